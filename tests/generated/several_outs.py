# (Tensor x, *, Tensor(a!) u, Tensor(b!) v) -> (Tensor(a!), Tensor(b!))
# tags=Tag.out, no backward

# Autograd
def autograd(_keyset, /, x, *, u, v):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (u is not None and u.requires_grad) or (v is not None and v.requires_grad))):
            if u is not None and v is not None:
                _increment_version((u, v))
            else:
                _increment_version(_tensors_in((u, v)))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, u=u, v=v)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, u=u, v=v)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, u=u, v=v)
            if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
                raise _result_error(_result, _fn)
            return _result
    return _general(_keyset, _current, (x,), _dict(u=u, v=v))

# CompositeExplicitAutograd
def kernel(x, *, u, v):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, u=u, v=v)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, u=u, v=v)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, u=u, v=v)
    if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
        raise _result_error(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, *, u, v):
    if u is not None and v is not None:
        _increment_version((u, v))
    else:
        _increment_version(_tensors_in((u, v)))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, u=u, v=v)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, u=u, v=v)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, u=u, v=v)
    if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
        raise _result_error(_result, _fn)
    return _result

# ADInplaceOrView
def ad_inplace_or_view(_keyset, /, x, *, u, v):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if u is not None and v is not None:
            _increment_version((u, v))
        else:
            _increment_version(_tensors_in((u, v)))
        _fn = _current.fn
        if _autocast_is_on():
            _result = _call_plainly(_fn, x, u=u, v=v)
        elif _is_grad_enabled():
            _set_grad_enabled(False)
            try:
                _result = _fn(x, u=u, v=v)
            finally:
                _set_grad_enabled(True)
        else:
            _result = _fn(x, u=u, v=v)
        if not _isinstance(_result, _sequences) or _len(_result) != 2 or _result[0] is not u or _result[1] is not v:
            raise _result_error(_result, _fn)
        return _result
    return _general(_keyset, (x,), _dict(u=u, v=v))

# Autograd, apply
def apply(_kernel, x, *, u, v):
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, x, u, v)
    if _outcome.mutated:
        _attach_graph(_outcome, _result)
    return _unflatten((_result if _isinstance(_result, _tuple) else (_result,)), _outcome.lengths)[:2]

# Autograd, forward
def forward(_ctx, _kernel, _outcome, x, u, v):
    _flat = (x, u, v)
    _inputs = {0: x, 1: u, 2: v}
    _originals, _dirty = _mutation.begin(_inputs, _flat)
    with _mutation.recorded(_dirty):
        _result = _kernel(x, u=u, v=v)
    if _type(_result) is not _tuple:
        _result = _tuple(_result)
    _outputs = _mutation.end(_ctx, _outcome, _inputs, _result, _dirty)
    x = _inputs[0]
    u = _inputs[1]
    v = _inputs[2]
    __, __, _needs_x, _needs_u, _needs_v, = _ctx._customops_raw_flags
    _like = _metadata
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(u) if _needs_u else None, _like(v) if _needs_v else None)
    _finish(_ctx, _flat, _outputs)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)
