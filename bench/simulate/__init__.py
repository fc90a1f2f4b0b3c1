"""Steps of training on networks that are not here: rounds under a clock."""
