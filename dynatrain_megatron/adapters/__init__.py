"""Megatron seen as a Virtual Parameter Space, and built anew for another layout.

``job``          the running job: the host objects that a switch reads and replaces
``arguments``    target arguments from Megatron's own parse and validation of the launch flags
``hybrid``       where the pipeline of a target cuts a Hybrid model
``batches``      how many samples steps have, asked before a switch
``groups``       process groups of a layout: built aside, installed whole, destroyed one by one
``state``        parameters, buffers and optimizer shards as fragments
``skeleton``     model, optimizer, scheduler and iterators of the target, without initialisation
``built``        layouts with all of that: the one in force, and dormant ones for a switch back
``handover``     the objects Megatron's frames already hold take the new ones' place
``samplers``     the samples of each step stay those of a run that never switches
``position``     where a run is besides its tensors, for processes that join
``timers``       seconds of a switch among Megatron's timers
``writers``      Megatron's writers follow to whichever process has the last rank
``saved``        a checkpoint as it lies on disk, read without ranks or model
``saved_state``  its fingerprints: those of the same state in a running job
``support``      options that a switch could break: carried, restarted, or refused by name
``datasets``     indexed datasets written

Megatron is imported inside functions: the platform must be installed first.
"""
