"""An op in torch's dispatcher: its name, its overload, and what is registered for it.

`operator.OpSpec` is what an op is; `operator.OperatorHandle` defines it, installs kernels at dispatch keys, remembers
which kernel a key set leads to, and takes the op out again. `rule` keeps the newest registration for each key,
`registrations` are taken back. `callbacks` checks that a user's function takes the op's arguments, and puts in those
that the dispatcher left out; `results` checks what it returned. `names` reads those of ops and device types, and finds
the overload that a user means; `fingerprint` tells compilers one version of an op from another.

    register_*(fn) -> callbacks.bind -> rule.Rule.set -> operator.OperatorHandle.impl -> torch
"""
