# (Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)
# tags=Tag.out, no backward

# Autograd
def autograd(_keyset, /, x, y, *, out):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (y is not None and y.requires_grad) or (out is not None and out.requires_grad))):
            if out is not None:
                _increment_version((out,))
            _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y, out=out)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y, out=out)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y, out=out)
            if _result is not out:
                raise _result_error(_result, _fn)
            return _result
    return _general(_keyset, _current, (x, y), _dict(out=out))

# CompositeExplicitAutograd
def kernel(x, y, *, out):
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, out=out)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, out=out)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, out=out)
    if _result is not out:
        raise _result_error(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, y, *, out):
    if out is not None:
        _increment_version((out,))
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, out=out)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, out=out)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, out=out)
    if _result is not out:
        raise _result_error(_result, _fn)
    return _result

# ADInplaceOrView
def ad_inplace_or_view(_keyset, /, x, y, *, out):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if out is not None:
            _increment_version((out,))
        _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
        if _autocast_is_on():
            _result = _call_plainly(_fn, x, y, out=out)
        elif _is_grad_enabled():
            _set_grad_enabled(False)
            try:
                _result = _fn(x, y, out=out)
            finally:
                _set_grad_enabled(True)
        else:
            _result = _fn(x, y, out=out)
        if _result is not out:
            raise _result_error(_result, _fn)
        return _result
    return _general(_keyset, (x, y), _dict(out=out))

# Autograd, apply
def apply(_kernel, x, y, *, out):
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, x, y, out)
    if _outcome.mutated:
        _attach_graph(_outcome, _result)
    return _unflatten((_result if _isinstance(_result, _tuple) else (_result,)), _outcome.lengths)[0]

# Autograd, forward
def forward(_ctx, _kernel, _outcome, x, y, out):
    _flat = (x, y, out)
    _inputs = {0: x, 1: y, 2: out}
    _originals, _dirty = _mutation.begin(_inputs, _flat)
    with _mutation.recorded(_dirty):
        _result = _kernel(x, y, out=out)
    _outputs = _mutation.end(_ctx, _outcome, _inputs, (_result,), _dirty)
    x = _inputs[0]
    y = _inputs[1]
    out = _inputs[2]
    __, __, _needs_x, _needs_y, _needs_out, = _ctx._customops_raw_flags
    _like = _metadata
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(y) if _needs_y else None, _like(out) if _needs_out else None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)
