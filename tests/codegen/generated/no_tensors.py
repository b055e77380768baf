# (SymInt[] size, *, Device device) -> Tensor
# no backward

# Autograd
def autograd(_keyset, /, size, *, device):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not False:
            _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
            if _autocast_is_on():
                _result = _call_plainly(_fn, size, device=device)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(size, device=device)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(size, device=device)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, size, device=device)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (size,), _dict(device=device))

# CompositeExplicitAutograd
def kernel(size, *, device):
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, size, device=device)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(size, device=device)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(size, device=device)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    return _result

# Autograd, apply
def apply(_kernel, size, **_named):
    _result = _function(_kernel, _named, size)
    return _result

# Autograd, forward
def forward(_ctx, _kernel, _named, size):
    _result = _kernel(_list(size), **_named)
    _ctx._customops_expected = (None,)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result
