"""A plan's graph to look at: as text, DOT, GraphML and one HTML page."""
