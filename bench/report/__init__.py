"""Report of training runs: one page that needs no network, with pictures, their words and their numbers.

`runs` reads files; `learning`, `step_time` and `chosen` turn runs into sections, whose pictures `draw` makes with
matplotlib; `comparison` finds the verdict; `write` puts all into page.html. Importing the package loads none of them.
"""
