// "toy": a device for PyTorch in one file, in two pieces (toy:0 and toy:1). Its memory is the host's and its arithmetic
// the CPU's, so it runs anywhere. All around these is real: what an extension for hardware registers, in the order in
// which one would write it. toy.py beside it is the Python half.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/native/quantized/AffineQuantizer.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/abs_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/quantize_per_tensor_native.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/set_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/strides.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <span>

// <ATen/autocast_mode.h> declares it too, and includes all of ATen: the build would take half as long again.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType);
}

namespace {

using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::OperatorHandle;
using std::optional, torch::jit::Stack;

constexpr auto kToy = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

// -- Devices ---------------------------------------------------------------------------------------------------------

thread_local DeviceIndex current_device = 0;

// An index from the user; -1 stands for the current device.
DeviceIndex existing(int64_t index) {
  if (index == -1) return current_device;
  TORCH_CHECK(0 <= index && index < kDevices, "there is no toy:", index, ": the last one is toy:", kDevices - 1);
  return static_cast<DeviceIndex>(index);
}

DeviceIndex exchange(DeviceIndex index) { return std::exchange(current_device, existing(index)); }

// -- Streams ---------------------------------------------------------------------------------------------------------

// A pool for each device: torch.Stream(device="toy") is handed the next one, and after the last the first again, so
// that a program that makes many has a few. Stream 0 is the default one. Hardware would have a queue behind each; here
// work is done when a call returns, so nothing ever waits.
constexpr c10::StreamId kStreams = 8;
thread_local std::array<c10::StreamId, kDevices> current_stream{};
std::array<std::atomic<c10::StreamId>, kDevices> handed_out{};

c10::Stream stream(Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kToy, existing(device.index())}, id);
}

// The autograd engine starts a thread for each device that this counts; backward of toy:1 runs on the second one. It
// runs a node on the stream that was current in its forward, and records an event where a gradient goes to another.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kToy; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kToy, current_device}; }
  Device exchangeDevice(Device device) const override { return {kToy, exchange(device.index())}; }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(Device device) const override {
    return stream(device, current_stream.at(existing(device.index())));
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device, 1 + handed_out.at(existing(device.index()))++ % kStreams);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(to.device(), std::exchange(current_stream.at(existing(to.device_index())), to.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- Memory ----------------------------------------------------------------------------------------------------------

// Every block that is alive, by its address: for the count of bytes, and to know pinned memory, which belongs to the
// CPU (index -1).
struct Memory {
  struct Block {
    int64_t bytes;
    Device device;
  };
  std::mutex mutex;
  std::map<const void*, Block> blocks;
  std::array<std::atomic<int64_t>, kDevices + 1> live{};

  c10::DataPtr allocate(size_t bytes, Device device) {
    if (bytes == 0) return {nullptr, device};
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard lock(mutex);
    auto& block = blocks.insert({data, {static_cast<int64_t>(bytes), device}}).first->second;
    live[device.index() + 1] += block.bytes;
    return {data, data, &release, device};
  }

  bool is_pinned(const void* pointer) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(pointer);
    if (after == blocks.begin()) return false;
    auto& [data, block] = *std::prev(after);
    return block.device.is_cpu() && pointer < static_cast<const char*>(data) + block.bytes;
  }

  static void release(void* data);
};
auto& memory = *new Memory; // never destroyed: tensors may outlive what is

void Memory::release(void* data) {
  std::lock_guard lock(memory.mutex);
  auto block = memory.blocks.extract(data).mapped();
  memory.live[block.device.index() + 1] -= block.bytes;
  c10::free_cpu(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return memory.allocate(bytes, {kToy, current_device}); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// torch.accelerator.empty_host_cache() calls the allocator of pinned memory, whether or not there is one. Ours keeps no
// cache, and need not know which streams use its memory: work is done when a call returns.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override { return memory.allocate(bytes, at::kCPU); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kToy, &device_allocator)
REGISTER_HOST_ALLOCATOR(kToy, &pinned_allocator)

// A StorageImpl of our own has room for what a device wants to know of its memory; here, how often it was resized.
struct Storage final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
  int64_t resizes = 0;

  static Storage& of(const c10::Storage& storage) {
    auto* ours = dynamic_cast<Storage*>(storage.unsafeGetStorageImpl());
    TORCH_CHECK(ours, "this storage, on ", storage.device(), ", is not one that toy made");
    return *ours;
  }
};

// torch calls this for torch.UntypedStorage(device="toy"), and `empty_strided` below for tensors.
c10::intrusive_ptr<c10::StorageImpl> make_storage(
    c10::StorageImpl::use_byte_size_t how, c10::SymInt bytes, c10::DataPtr data, c10::Allocator* from, bool resizable) {
  if (data.device().type() != kToy) data = from->allocate(bytes.expect_int());
  return c10::make_intrusive<Storage>(how, bytes, std::move(data), from, resizable);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = memory.allocate(bytes, storage.device());
  if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
  auto& impl = Storage::of(storage);
  impl.set_data_ptr_noswap(std::move(fresh));
  impl.set_nbytes(bytes);
  ++impl.resizes;
}

// -- Random numbers, and what else torch asks of a device outside of kernels -----------------------------------------

// What torch.Generator(device="toy") makes: a generator of the CPU under the name of the device. The fallback takes the
// one out of the other, so that random numbers are those the CPU draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl({kToy, index}, DispatchKeySet(DispatchKey::PrivateUse1)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }
};

const at::Generator& default_generator(int64_t index) {
  static std::array<at::Generator, kDevices> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(existing(index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(existing(i)); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return memory.is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override { resize_storage(s, bytes); }
};

// -- Metadata of tensors ---------------------------------------------------------------------------------------------

// Labels that go with a tensor through detach, torch.save and torch.load. torch stores named flags and nothing else, so
// a label is saved as the flag "toy:<label>".
struct Labels final : c10::BackendMeta {
  std::set<std::string> names;
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    auto copy = c10::make_intrusive<Labels>();
    copy->names = names;
    return copy;
  }
  static Labels* of(const Tensor& t) { return dynamic_cast<Labels*>(t.unsafeGetTensorImpl()->get_backend_meta()); }
};

void add_label(const Tensor& tensor, std::string name) {
  TORCH_CHECK(tensor.is_privateuseone(), "a tensor on toy can have labels, this one is on ", tensor.device());
  if (!Labels::of(tensor)) tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Labels>());
  Labels::of(tensor)->names.insert(std::move(name));
}

std::vector<std::string> labels(const Tensor& tensor) {
  auto* found = Labels::of(tensor);
  return found ? std::vector(found->names.begin(), found->names.end()) : std::vector<std::string>();
}

using Flags = std::unordered_map<std::string, bool>;
void save_labels(const Tensor& tensor, Flags& flags) {
  for (auto& name : labels(tensor)) flags["toy:" + name] = true;
}
void load_labels(const Tensor& tensor, Flags& flags) {
  for (auto& [flag, set] : flags)
    if (set && flag.starts_with("toy:")) add_label(tensor, flag.substr(4));
}

// -- Kernels: tensors ------------------------------------------------------------------------------------------------

using Dtype = optional<ScalarType>;
using Layout = optional<at::Layout>;
using Where = optional<Device>;
using Pin = optional<bool>;
using Format = optional<at::MemoryFormat>;

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Layout layout, Where device, Pin pin) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "toy has strided tensors, and no ", *layout, " ones");
  TORCH_CHECK(!pin.value_or(false), "only memory of the CPU can be pinned, not that of toy");
  at::detail::check_size_nonnegative(size);
  auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  auto bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  auto data = memory.allocate(bytes, {kToy, existing(device ? device->index() : -1)});
  auto storage = make_storage({}, bytes, std::move(data), &device_allocator, /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

Tensor empty(IntArrayRef size, Dtype dtype, Layout layout, Where device, Pin pin, Format format) {
  at::detail::check_size_nonnegative(size);
  auto tensor = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pin);
  if (format) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

// Zeros that autograd would like to own no memory. Ours do.
Tensor efficient_zeros(IntArrayRef size, Dtype dtype, Layout layout, Where device, Pin pin) {
  return empty(size, dtype, layout, device, pin, std::nullopt).zero_();
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, Format format) {
  auto bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

// May `self.data = other` be? torch knows that of devices of its own. nn.Module.to asks, and where the answer is no makes
// new parameters: tied weights come apart, and an optimizer that was made before trains the old ones.
bool may_take_over(const Tensor& self, const Tensor& other) {
  return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

Tensor& set_nothing(Tensor& self) { return self.set_(self.new_empty({0})); }

// The CPU's lets the storage grow, by an allocator that asks for the current device.
Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  c10::DeviceGuard guard(source.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

// What sets sizes and strides and reads no element is the same for every device: the kernel of the CPU, on our tensor.
template <DispatchKey key>
void kernel_of(const OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(key), stack);
}

// -- Kernels: elements -----------------------------------------------------------------------------------------------

// The memory of a tensor as one of the CPU, for kernels to compute on. Hardware would launch something here.
Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

optional<Tensor> host(const optional<Tensor>& tensor) { return tensor ? optional(host(*tensor)) : std::nullopt; }

// All copies end here: in every direction, with any dtypes and strides. A conjugate or negative view arrives as it is
// (see the fallthroughs at the end), with a bit that says so, and copy_ of the CPU reads the bit.
Tensor copy_from(const Tensor& self, const Tensor& to, bool /*non_blocking*/) {
  // What the profiler shows below aten::copy_; hardware would name what it launches.
  RECORD_FUNCTION(self.device() == to.device() ? "toy::copy" : to.is_cpu() ? "toy::to_host" : "toy::from_host", {});
  // The CPU would not see it: what host() returns has a storage of its own.
  at::assert_no_internal_overlap(to);
  if (self.device() == to.device()) at::assert_no_partial_overlap(to, self);
  host(to).copy_(host(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Scalar item(const Tensor& self) { return host(self).item(); }

Tensor& fill_(Tensor& self, const Scalar& value) {
  host(self).fill_(value);
  return self;
}

Tensor& zero_(Tensor& self) { return self.fill_(0); }

// TensorIterator checks the devices, broadcasts, promotes, and makes or resizes the result. This one kernel also serves
// a.add_(b); add.Tensor would be made of it too, and is there to save a call.
Tensor& add_out(const Tensor& a, const Tensor& b, const Scalar& alpha, Tensor& out) {
  out = at::TensorIterator::binary_op(out, a, b).output();
  RECORD_FUNCTION("toy::add", {});
  auto result = host(out);
  at::add_out(result, host(a), host(b), alpha);
  return out;
}

Tensor add(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  Tensor out;
  return add_out(a, b, alpha, out);
}

// Beside the dispatcher torch has tables of inner loops, by device. at::native::abs_out does all the rest of abs, and
// at::native::quantize_per_tensor that of quantizing.
void abs_loop(at::TensorIteratorBase& iter) {
  auto result = host(iter.output());
  at::abs_out(result, host(iter.input()));
}

Tensor quantize(const Tensor& self, double scale, int64_t zero_point, ScalarType dtype) {
  c10::DeviceGuard guard(self.device()); // the result is made by our allocator
  return at::native::quantize_per_tensor(self, scale, zero_point, dtype);
}

void quantize_loop(const Tensor& from, Tensor& to, double scale, int64_t zero_point) {
  AT_DISPATCH_QINT_TYPES(to.scalar_type(), "quantize", [&] {
    auto [in, out] = std::pair(from.const_data_ptr<float>(), to.data_ptr<scalar_t>());
    for (int64_t i = 0; i < from.numel(); ++i) out[i] = at::native::quantize_val<scalar_t>(scale, zero_point, in[i]);
  });
}

void dequantize_loop(const Tensor& from, Tensor& to, double scale, int64_t zero_point) {
  AT_DISPATCH_QINT_TYPES(from.scalar_type(), "dequantize", [&] {
    auto [in, out] = std::pair(from.const_data_ptr<scalar_t>(), to.data_ptr<float>());
    for (int64_t i = 0; i < from.numel(); ++i) out[i] = at::native::dequantize_val(scale, zero_point, in[i]);
  });
}

// -- Kernels: attention ----------------------------------------------------------------------------------------------

// torch asks which way F.scaled_dot_product_attention shall go: through our two kernels or, for what these cannot do,
// through the formula in plain operations.
int64_t choose_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double dropout, bool /*causal*/,
    optional<double> /*scale*/, bool grouped) {
  auto like_q = [&](const Tensor& t) {
    return t.dim() == 4 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(3) == q.size(3) &&
        t.scalar_type() == q.scalar_type() && t.stride(3) == 1 && t.numel() > 0;
  };
  auto plain = [&](const Tensor& mask) {
    return (mask.dim() == 2 || mask.dim() == 4) && mask.stride(-1) == 1 && !mask.requires_grad() &&
        mask.device() == q.device();
  };
  bool ours = like_q(q) && like_q(k) && like_q(v) && (!mask || plain(*mask)) && q.is_floating_point() && dropout == 0 &&
      !grouped && at::globalContext().userEnabledOverrideableSDP();
  return static_cast<int64_t>(ours ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double dropout, bool causal,
    bool /*return_debug_mask*/, optional<double> scale) {
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      host(q), host(k), host(v), dropout, causal, host(mask), scale);
  auto none = at::empty({0}, q.options().dtype(at::kLong)); // for sequences of many lengths, and for dropout
  return {out.to(q.device()), logsumexp.to(q.device()), none, none, q.size(2), k.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
    std::array<bool, 4> /*wanted*/, const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, int64_t,
    int64_t, double dropout, bool causal, const Tensor&, const Tensor&, optional<double> scale) {
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host(grad), host(q), host(k), host(v), host(out), host(logsumexp), dropout, causal,
      mask.defined() ? optional(host(mask)) : std::nullopt, scale);
  return {dq.to(q.device()), dk.to(q.device()), dv.to(q.device()), Tensor()};
}

// -- Everything else, by the CPU -------------------------------------------------------------------------------------

std::mutex fallback_mutex;
std::unordered_map<c10::OperatorName, int64_t> fallbacks;

// A tensor that stands for a number may be on the CPU when all others are on toy.
bool is_number(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

// The device of a call. torch's cpu_fallback would mix devices without a word. The indices that `index` takes are a
// list with gaps, which is no TensorList: they may be on the CPU.
Device device_of_call(const OperatorHandle& op, std::span<IValue> arguments) {
  Where found;
  auto see = [&](const Tensor& tensor) {
    if (!tensor.defined() || is_number(tensor)) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(*found == tensor.device() && tensor.is_privateuseone(), op.operator_name(),
                ": expected all tensors to be on the same device, but got ", *found, " and ", tensor.device());
  };
  for (auto& argument : arguments) {
    if (argument.isTensor()) see(argument.toTensor());
    if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorVector()) see(tensor);
    if (argument.isDevice() && !found) found = argument.toDevice();
  }
  return {kToy, existing(found ? found->index() : -1)};
}

// cpu_fallback puts the result where the first tensor is: if that is a number of the CPU, it has to be moved. One of
// Python gives way to the dtype of the tensor beside it, and there no longer would; so it is given that dtype.
void move_first_number(const c10::FunctionSchema& schema, std::span<IValue> arguments, Device device) {
  auto defined = [](const IValue& argument) { return argument.isTensor() && argument.toTensor().defined(); };
  auto first = std::ranges::find_if(arguments, defined);
  if (first == arguments.end() || !is_number(first->toTensor())) return;
  if (schema.arguments()[first - arguments.begin()].alias_info()) return; // is written to, so stays
  Tensor number = first->toTensor();
  auto next = std::find_if(first + 1, arguments.end(), defined);
  bool weak = number.unsafeGetTensorImpl()->is_wrapped_number() && next != arguments.end();
  *first = number.to(device, weak ? at::result_type(number, next->toTensor()) : number.scalar_type());
}

void fallback(const OperatorHandle& op, Stack* stack) {
  auto& parameters = op.schema().arguments();
  auto arguments = std::span(*stack).last(parameters.size());
  auto device = device_of_call(op, arguments);
  move_first_number(op.schema(), arguments, device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name() != "generator") continue;
    auto generator = arguments[i].isNone() ? default_generator(device.index()) : arguments[i].toGenerator();
    if (auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl())) arguments[i] = ours->host;
  }
  RECORD_FUNCTION("toy::fallback: " + c10::toString(op.operator_name()), {});
  std::unique_lock lock(fallback_mutex);
  ++fallbacks[op.operator_name()];
  lock.unlock();
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true); // it would return a copy and no view
}

c10::Dict<std::string, int64_t> fallback_counts() {
  std::lock_guard lock(fallback_mutex);
  c10::Dict<std::string, int64_t> counts;
  for (auto& [name, count] : fallbacks) counts.insert(c10::toString(name), count);
  return counts;
}

void reset_fallback_counts() {
  std::lock_guard lock(fallback_mutex);
  fallbacks.clear();
}

// torch has an op of its own for the convolutions of such devices, with the arguments of `convolution`. The one for the
// gradients lacks the shape of the bias.
OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
void convolution(const OperatorHandle&, Stack* stack) { fallback(find("aten::convolution"), stack); }
void convolution_backward(const OperatorHandle&, Stack* stack) {
  std::vector<int64_t> bias_shape{torch::jit::peek(*stack, 0, 10).toTensor().size(1)};
  stack->insert(stack->end() - 7, bias_shape);
  fallback(find("aten::convolution_backward"), stack);
}

// Autocast for the ops that are registered with it: cast what is not double, as torch does, and call the op again.
void in_lower_precision(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(kToy);
  for (auto& argument : std::span(*stack).last(op.schema().arguments().size())) {
    if (!argument.isTensor() || !argument.toTensor().is_privateuseone()) continue;
    const Tensor& tensor = argument.toTensor();
    if (tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) argument = tensor.to(dtype);
  }
  op.callBoxed(stack);
}

using torch::CppFunction;

} // namespace

// -- Registration ----------------------------------------------------------------------------------------------------

namespace at::native { // where these macros expect to be
REGISTER_PRIVATEUSE1_DISPATCH(abs_stub, &abs_loop)
REGISTER_PRIVATEUSE1_DISPATCH(quantize_tensor_per_tensor_affine_stub, &quantize_loop)
REGISTER_PRIVATEUSE1_DISPATCH(dequantize_tensor_per_tensor_affine_stub, &dequantize_loop)
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
} // namespace at::native

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("_has_compatible_shallow_copy_type", &may_take_over);
  m.impl("record_stream", [](Tensor&, c10::Stream) {}); // work is done when a call returns
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  for (auto op : {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
                  "set_.source_Storage", "set_.source_Tensor"})
    m.impl(op, CppFunction::makeFromBoxedFunction<&kernel_of<DispatchKey::CPU>>());
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("fill_.Scalar", &fill_);
  m.impl("zero_", &zero_);
  m.impl("add.Tensor", &add);
  m.impl("add.out", &add_out);
  m.impl("abs.out", &at::native::abs_out);
  m.impl("quantize_per_tensor", &quantize);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // These have a kernel for every device, made of other ops. Named here, each goes to the CPU as one.
  for (auto op : {"sub.Tensor", "_foreach_add.List", "index.Tensor", "triu_indices"})
    m.impl(op, CppFunction::makeFromBoxedFunction<&fallback>());
}

// A quantized tensor has a dispatch key of its own.
TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  for (auto op : {"q_scale", "q_zero_point", "qscheme", "int_repr", "dequantize.self"})
    m.impl(op, CppFunction::makeFromBoxedFunction<&kernel_of<DispatchKey::QuantizedCPU>>());
}

// Any op, of any library, that has no kernel for us.
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(CppFunction::makeFromBoxedFunction<&fallback>()); }

// Without this, ops that autocast says nothing of would have no kernel at its key.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto op : {"mm", "bmm", "addmm", "linear", "matmul", "scaled_dot_product_attention"})
    m.impl(op, CppFunction::makeFromBoxedFunction<&in_lower_precision>());
}

// torch resolves a conjugate or negative view by a copy, which calls _copy_from: if that resolved its arguments too, it
// would copy for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  for (auto op : {"_copy_from", "_copy_from_and_resize"}) m.impl(op, CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  for (auto op : {"_copy_from", "_copy_from_and_resize"}) m.impl(op, CppFunction::makeFallthrough());
}

// For toy.py, as torch.ops.toy.<name>: without pybind the library needs nothing of Python.
TORCH_LIBRARY(toy, m) {
  m.def("device_count() -> int", [] { return int64_t(kDevices); });
  m.def("current_device() -> int", [] { return int64_t(current_device); });
  m.def("exchange_device(int index) -> int", [](int64_t index) { return int64_t(exchange(existing(index))); });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(index); });
  m.def("live_bytes(int index) -> int", [](int64_t index) { return memory.live.at(existing(index) + 1).load(); });
  m.def("pinned_bytes() -> int", [] { return memory.live.at(0).load(); });
  m.def("fallback_counts", &fallback_counts);
  m.def("reset_fallback_counts", &reset_fallback_counts);
  m.def("storage_resizes(Tensor x) -> int", [](const Tensor& x) { return Storage::of(x.storage()).resizes; });
  m.def("add_label(Tensor x, str label) -> ()", &add_label);
  m.def("labels(Tensor x) -> str[]", &labels);
}

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetStorageImplCreate(kToy, &make_storage);
  torch::jit::TensorBackendMetaRegistry(kToy, &save_labels, &load_labels);
  return true;
}();
