"""Megatron seen as a Virtual Parameter Space, and built anew for another layout.

``arguments``  target arguments from Megatron's own parse and validation of the launch flags
``groups``     process groups of a layout: built aside, installed whole, destroyed one by one
``state``      parameters, buffers and optimizer shards as fragments
``skeleton``   model, optimizer, scheduler and iterators of the target, without initialisation
``built``      layouts with all of that: the one in force, and dormant ones for a switch back
``handover``   the objects Megatron's frames already hold take the new ones' place
``support``    what is not supported yet, refused by name
``datasets``   indexed datasets written

Megatron is imported inside functions: the platform must be installed first.
"""
