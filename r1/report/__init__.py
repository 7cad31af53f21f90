"""A run as one HTML page: curves, times, validation, samples with pictures, settings; several runs side by side."""
