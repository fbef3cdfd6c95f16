"""Is this machine fit for a run? What is wrong, how to mend it, and the proof that it is mended."""
