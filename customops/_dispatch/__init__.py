"""An op in torch's dispatcher: its name, its overload, and what is registered for it.

`spec.OpSpec` is what an op is; `operator.OperatorHandle` defines it and installs kernels at dispatch keys.
`rule` keeps the newest registration for each key; `registrations` are taken back. `fast_path` remembers which kernel a
key set leads to. `callbacks` checks that a user's function takes the op's arguments, `fill_defaults` puts in those that
the dispatcher left out, `results` checks what it returned. `devices` reads device types, `lookup` finds the overload
that a user means, `fingerprint` tells compilers one version of an op from another, `removal` takes an op out again.

    register_*(fn) -> callbacks.bind -> rule.Rule.set -> operator.OperatorHandle.impl -> torch
"""
