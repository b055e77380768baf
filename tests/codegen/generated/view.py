# (Tensor(a) x, int dim) -> Tensor(a)

# Autograd
def autograd(_keyset, /, x, dim):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and x.requires_grad):
            _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, dim)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, dim)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, dim)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, dim)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, dim), {})

# CompositeExplicitAutograd
def kernel(x, dim):
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on():
        _result = _call_plainly(_fn, x, dim)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, dim)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, dim)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    return _result

# Autograd, forward
def forward(_ctx, _kernel, x, dim):
    _result = _kernel(x, dim)
    __, _needs_x, __, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None, None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
    _seen = _ctx
    if _ctx._customops_hooked:
        _seen = _unpacked_once(_ctx)
    if _ctx._customops_untracked is not None and _may_be_differentiated():
        _seen = _guarded(_ctx, _op)
    try:
        if _autocast_is_on():
            _result = _call_without_autocast(_fn, _seen, *_grads)
        else:
            _result = _fn(_seen, *_grads)
    except _AttributeError as _error:
        _ctx._customops_missing(_error)
        raise
    _likes = _ctx._customops_expected
    if _type(_result) is _tuple and _len(_result) == 2:
        _grad_x, _grad_dim, = _result
        _like_x, _like_dim, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and _grad_dim is None:
            return None, _grad_x, _grad_dim
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
