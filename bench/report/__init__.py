"""Report of training runs: one page that needs no network, with four plots, their findings in words, and a table."""
