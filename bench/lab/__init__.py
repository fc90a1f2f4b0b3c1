"""An emulated cluster: hosts are network namespaces, links are shaped."""
