"""Systems that are optimizers of PyTorch. They have no name to look up: a script imports the one that it uses."""
