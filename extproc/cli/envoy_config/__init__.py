"""`loopguard envoy-config`: a complete Envoy bootstrap, made from policies.

`templates/bootstrap.yaml` is the document; its comments are part of the output. The code only adds
what depends on the policies: the paths that Envoy sends to Loopguard, and their route names. Other
requests do not reach Loopguard and are not buffered.

`snippet` prints parts of the same document, for an existing Envoy.
"""
