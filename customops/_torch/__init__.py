"""The only package that touches private torch names: one module for each subsystem of torch that changes by itself.

What is here was seen to exist on the torch versions that CI runs. What differs between versions is probed in the module
of its subsystem, and the rest of the package calls a function that does the right thing on each:

    _torch.dispatcher.key_set("CPU")

Importing these modules loads neither Dynamo nor inductor, and changes nothing.
"""

from customops._torch.stand_ins import stand_ins

with stand_ins():
    from customops._torch import autograd as autograd
    from customops._torch import dispatcher as dispatcher
    from customops._torch import distributed as distributed
    from customops._torch import dynamo as dynamo
    from customops._torch import fakes as fakes
    from customops._torch import for_checks as for_checks
    from customops._torch import functionalization as functionalization
    from customops._torch import hooks as hooks
    from customops._torch import inductor as inductor
    from customops._torch import library as library
    from customops._torch import memory as memory
    from customops._torch import patches as patches
    from customops._torch import schema as schema
    from customops._torch import trees as trees
