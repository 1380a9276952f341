"""The Elastic Device Manager: worlds of processes come and go while training goes on.

A **world** is an ordered list of processes, with a default process group and any other groups they
make. It is built to the side, put in force by one assignment, and ended group by group; a process
has a rank in each world it is in, and another in the next.

=============== =======================================================================
module          holds
=============== =======================================================================
``world``       what a world is: its id, its processes in order; which process this is
``change``      who takes part in a switch: the processes before it, and those after
``build``       making a world beside the one in force
``building``    the thread that does so while the main thread trains
``gate``        lets that thread make groups only while the main thread stands still
``maker``       the groups of a world that is being built
``live``        a world that is built: putting it in force, ending it
``groups``      which groups outlive a world; ranks are renumbered, members stay
``connections`` the connections between a world's processes, so that they can be cut
``fake``        worlds whose groups move nothing, in which Megatron can be asked as any rank
``store``       the store that processes meet at, and a server of it
``reach``       the address of this host that gloo tells other processes
``directory``   who belongs to a job, wants to or has to go: keys of its store
``beats``       signs of life in it, and who is silent
``control``     how somebody outside asks something of a job, through the store or by a file
``endpoint``    the same through a socket
``records``     torch's records of groups, and the switch between them
``contract``    the internal names of torch that all this rests on, and their check
=============== =======================================================================

It knows torch.distributed, and neither Megatron nor any model.
"""
