"""`loopguard check-envoy`: settings in an Envoy's configuration that would cause problems.

`document` reads it from a file or from a running Envoy, and knows the place of each value. `config` finds the relevant parts:
listeners, routes, and the filters that call Loopguard. Each file of `checks/` is about one part of that. A check yields
findings, which say what is wrong, where, and what would be right. A note reports something that cannot be known, or is a
choice.
"""
