"""The ground floor, which every room uses: rows, files, locks, errors, digests, units."""
