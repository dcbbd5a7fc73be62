"""Measured processes of other people's engines: the only modules that import them.

Each gets the specification that our own measuring module of the same work gets, so that both sides do the
same with the same tokens:

====================  ==============================  ==============================================
work                  ours                            theirs
====================  ==============================  ==============================================
decode                ``measure.peers.decode``        the same, in the same rotation
prefill               ``measure.peers.prefill``       ``measure.peers.llama_prefill``
attention alone       ``measure.attention``           ``measure.peers.attention``
====================  ==============================  ==============================================

`programs` says which engines and settings there are, `llama` calls llama.cpp, and `llama_state` gives it our
rows; `openvino_attention` and `onnx_attention` make the graph of an attention, and what they store of our rows,
which `rows` lays out as others do.

Their libraries are imported after the process has noted which arm runs, so that one that does not load
costs its own rows only.
"""
