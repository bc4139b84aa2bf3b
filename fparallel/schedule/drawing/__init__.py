"""Pictures of schedules: a page to explore, a picture, a trace for Perfetto, a table. See ../draw.py."""
