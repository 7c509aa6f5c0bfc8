"""Products, scales, polar factors and spectra of matrices."""
