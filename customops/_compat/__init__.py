"""The only package that touches private torch names: one module for each subsystem of torch that changes by itself.

What is here was seen to exist on the torch versions that CI runs. What differs between versions is probed in the module
of its subsystem, and the rest of the package calls a function that does the right thing on each:

    _compat.dispatch.key_set("CPU")

`late`, `tags` < `replacement`, `schemas`, `dispatch`, `functorch`, `namespaces` < `autograd`, `memory`, `libraries` <
`kernel_state` < `guards`, `registries`, `tracing`, `dynamo`, `inductor`, `inductor_rules`, `graph_calls`,
`functionalization`, `out_variants`, `profiling`, `reinplace`, `substitution`, `symbols`, `tables`, `triton`. Importing
these loads neither Dynamo nor inductor.
"""

from customops._compat import stand_ins as _stand_ins

_stand_ins.put_in()

from customops._compat import autograd as autograd
from customops._compat import dispatch as dispatch
from customops._compat import dynamo as dynamo
from customops._compat import functionalization as functionalization
from customops._compat import functorch as functorch
from customops._compat import graph_calls as graph_calls
from customops._compat import guards as guards
from customops._compat import inductor as inductor
from customops._compat import inductor_rules as inductor_rules
from customops._compat import kernel_state as kernel_state
from customops._compat import libraries as libraries
from customops._compat import memory as memory
from customops._compat import namespaces as namespaces
from customops._compat import out_variants as out_variants
from customops._compat import profiling as profiling
from customops._compat import registries as registries
from customops._compat import reinplace as reinplace
from customops._compat import replacement as replacement
from customops._compat import schemas as schemas
from customops._compat import substitution as substitution
from customops._compat import symbols as symbols
from customops._compat import tables as tables
from customops._compat import tags as tags
from customops._compat import tracing as tracing
from customops._compat import triton as triton

_stand_ins.take_out()
