"""Report of training runs: one page that needs no network, with pictures, their words and their numbers.

A file for each thing that is looked at (`loss`, `phases`, `chosen`, `behind`, `predicted`, `ranks`) turns runs into
pictures; `draw` makes these with matplotlib, `page` puts them into HTML, `write` does the whole. Importing the package
loads none of them.
"""
