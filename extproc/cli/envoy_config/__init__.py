"""A complete Envoy bootstrap, made from policies: what `loopguard envoy-config` prints.

`templates/bootstrap.yaml` is the document; its comments go out with it, because users read those and not these
files. The code only works out what depends on the policies: which paths Envoy shows to Loopguard, and what those routes are
called. Any other request never meets Loopguard, and is not buffered either.

`snippet` prints parts of the same document, for an Envoy that has one of its own.
"""
