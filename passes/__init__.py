"""The compiler passes, one file each, in the order of `autotp/pipeline.py`:

capture, normalize, infer, match, choose, insert, localize, check, emit.

A pass is one public function of the file's name, from plain data to plain data.
"""

import autotp as autotp  # so that autotp always initialises first, whatever is imported first
