"""What a switch will move, take and need, worked out ahead: no GPU, no ranks, no job.

::

    configuration, flags ─► cases ─► estimate ─► text, picture
                                     plan, memory, rebuild, network

``cases``     model, layouts and topology of a switch, from a configuration or a job's ``flags``
``network``   messages on a topology's links, event by event
``rebuild``   what parameters take that are made anew from main parameters
``memory``    what each rank takes meanwhile
``estimate``  all of it for one switch; ``text`` and ``picture`` show it
``paper``     the published set-ups
"""
