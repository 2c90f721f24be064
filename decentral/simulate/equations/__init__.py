"""The methods' equations once more, in float64 and from the papers, apart from `decentral.optimizers`."""
