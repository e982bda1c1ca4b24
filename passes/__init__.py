"""The compiler passes, one file each, in the order of `autotp/pipeline.py`:

capture, normalize, unmask, infer, match, choose, part, insert, merge, sequence, share, divide,
fuse, localize, check, emit.

A pass is one public function of the file's name, from plain data to plain data.
"""

import autotp as autotp  # so that autotp always initialises first, whatever is imported first
