# (Tensor x) -> ()
# no backward

# Autograd
def autograd(_keyset, /, x):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and x.requires_grad):
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x)
            if _result is not None:
                _result = _structure(_result, _fn)
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x,), {})

# CompositeExplicitAutograd
def kernel(x):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x)
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result

# Autograd, apply
def apply(_kernel, x):
    _result = _function(_kernel, x)
    return None

# Autograd, forward
def forward(_ctx, _kernel, x):
    _result = _kernel(x)
    _needs = _ctx.needs_input_grad[1:]
    _ctx.needs_input_grad = (_needs[0],)
    _kept = _ctx.__dict__
    if '_customops_materialize' in _kept:
        _finish(_ctx, (x,), ())
    if not _compares.is_on:
        _kept['_customops_expected'] = (None,)
    elif _type(_kernel) is _partial:
        _kept['_customops_expected'] = (_metadata(x) if _needs[0] else None,)
    else:
        _kept['_customops_expected'] = (_facts(x) if _needs[0] else None,)
    return ()
