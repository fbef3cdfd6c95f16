"""One command-line entry per rule; each runs by hand as `python -m scripts.<rule> --help`."""
