# (Tensor(a!) x, Tensor y, *, int n=1) -> ()
# bypass=True, no backward

# A call of the object
def __call__(_self, /, x, y, *, n=_default_2):
    if _is_dynamo_compiling():
        return _self._opoverload(x, y, n=n)
    if (
        (_type(x) is _Tensor or _type(x) is _Parameter)
        and (_type(y) is _Tensor or _type(y) is _Parameter)
        and (n is _default_2 or (_type(n) is _int and -0x8000000000000000 <= n <= 0x7FFFFFFFFFFFFFFF or _type(n) is _bool))
        and not _is_torch_function_mode_enabled()
        and not _profiler._is_profiler_enabled
        and _forward_ad._current_level < 0
        and not _transforms_active()
        and not (x.is_nested or y.is_nested)
    ):
        _records = _is_grad_enabled()
        for _looks_same, _count, _needs_grad, _current in _self._definition.fast_path.recent:
            if _count == 2 and not (_needs_grad and _records) and _looks_same(x, y):
                break
        else:
            _current = _self._definition.find_past_dispatcher((x, y))
        if _current is not None:
            if _type(n) is _bool:
                n = _int(n)
            if x is not None:
                _increment_version((x,))
            _fn = _current.fn
            if _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y, n=n)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y, n=n)
            if _result is not None:
                _result = _structure(_result, _fn)
            return _result
    try:
        return _self._entry(x, y, n=n)
    except _RuntimeError as _error:
        try:
            _self._definition.explain(_error)
            raise
        except _CustomOpsError as _said:
            _cut(_said)
            raise

# Autograd
def autograd(_keyset, /, x, y, *, n=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (y is not None and y.requires_grad))):
            if x is not None:
                _increment_version((x,))
            _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y, n=n)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y, n=n)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y, n=n)
            if _result is not None:
                _result = _structure(_result, _fn)
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, y, n=n)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, y), _dict(n=n))

# CompositeExplicitAutograd
def kernel(x, y, *, n=_default_2):
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, n=n)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, n=n)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, n=n)
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, y, *, n=_default_2):
    if x is not None:
        _increment_version((x,))
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, n=n)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, n=n)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, n=n)
    if _result is not None:
        _result = _structure(_result, _fn)
    return _result

# ADInplaceOrView
def ad_inplace_or_view(_keyset, /, x, y, *, n=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if x is not None:
            _increment_version((x,))
        _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
        if _autocast_is_on():
            _result = _call_plainly(_fn, x, y, n=n)
        elif _is_grad_enabled():
            _set_grad_enabled(False)
            try:
                _result = _fn(x, y, n=n)
            finally:
                _set_grad_enabled(True)
        else:
            _result = _fn(x, y, n=n)
        if _result is not None:
            _result = _structure(_result, _fn)
        return _result
    return _general(_keyset, (x, y), _dict(n=n))

# Autograd, apply
def apply(_kernel, x, y, **_named):
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, _named, x, y)
    if _outcome.mutated:
        _attach_graph(_outcome, _result)
    return None

# Autograd, forward
def forward(_ctx, _kernel, _outcome, _named, x, y):
    _flat = (x, y)
    _inputs = {0: x, 1: y}
    _originals, _dirty = _mutation.begin(_inputs, _flat)
    with _mutation.recorded(_dirty):
        _result = _kernel(x, y, **_named)
    _outputs = _mutation.end(_ctx, _outcome, _inputs, (), _dirty)
    x = _inputs[0]
    y = _inputs[1]
    __, __, __, _needs_x, _needs_y, = _ctx._customops_raw_flags
    _like = _metadata
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(y) if _needs_y else None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)
