"""Modules of a Megatron model that replace those which need TransformerEngine."""
