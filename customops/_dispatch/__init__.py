"""An op in torch's dispatcher: its name, its overload, and what is registered for it.

`operator.OpSpec` is what an op is; `operator.OperatorHandle` defines it, installs kernels at dispatch keys, remembers
which kernel a key set leads to, and takes the op out again. `rule` keeps the newest registration for each key,
`registrations` are taken back. `callbacks` checks that a user's function takes the op's arguments; `results`
checks what the function returned, and `call_errors` explains what the dispatcher refuses.
`names` and `devices` read the names of ops and of device types; `options` are those of an op's calls, and the
environment variables for them. `fingerprint` tells compilers one version of an op from another.

    register_*(fn) -> callbacks.bind -> rule.Rule.set -> operator.OperatorHandle.impl -> torch
"""
