# (Tensor(a!) x, Tensor y, *, int n=1) -> ()
# bypass=True, no backward

# A call of the object
def __call__(_self, /, *_args, **_kwargs):
    if _is_dynamo_compiling():
        return _self._opoverload(*_args, **_kwargs)
    _op = _self._definition
    if not _kwargs and _len(_args) == 2:
        x, y = _args
        if (
            _type(x) in _tensors
            and _type(y) in _tensors
            and not _is_torch_function_mode_enabled()
            and not ((x.requires_grad or y.requires_grad) and _is_grad_enabled())
            and _forward_ad._current_level < 0
            and not _is_excluded(_counting)
        ):
            _keys = _keys_of(x)
            _where = _keys.raw_repr(), _included_keys().raw_repr()
            _current = _op.fast_path.of_tensors.get(_where)
            if _current is not None and _keys_of(y) == _keys:
                return _current.direct(x, y)
            if _current is None and _where not in _op.fast_path.of_tensors:
                _op.find_fast_path_of(_keys, _included_keys())  # for the next call
    try:
        return _self._entry(*_args, **_kwargs)
    except _RuntimeError as _error:
        _op.explain(_error)
        raise

# Autograd
def autograd(_keyset, /, x, y, *, n=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (((x is not None and x.requires_grad) or (y is not None and y.requires_grad)) and _is_grad_enabled()):
            if x is not None:
                _increment_version((x,))
            _fn = _current.fn
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
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, y, n=n)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, y), {'n': n})

# CompositeExplicitAutograd
def kernel(x, y, *, n=_default_2):
    _fn = _current.fn
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
    _fn = _current.fn
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
    _needs = _ctx.needs_input_grad[3:]
    _ctx.needs_input_grad = (_needs[0], _needs[1])
    _kept = _ctx.__dict__
    if '_customops_materialize' in _kept:
        _finish(_ctx, _flat, _outputs)
    if not _compares.is_on:
        _ctx._customops_expected = (None, None)
    else:
        _ctx._customops_expected = (_metadata(x) if _needs[0] else None, _metadata(y) if _needs[1] else None)
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)
