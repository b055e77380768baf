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
    __, _needs_x, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None,)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return ()
