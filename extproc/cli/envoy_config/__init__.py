"""A complete Envoy bootstrap, made from policies: the output of `loopguard envoy-config`.

`templates/bootstrap.yaml` is the document. Its comments are part of the output, because users read the output and not these
files. The code only adds what depends on the policies: the paths that Envoy sends to Loopguard, and the names of their routes.
Other requests never reach Loopguard, and are not buffered either.

`snippet` prints parts of the same document, for an existing Envoy.
"""
