// Facts about the current device, read once per device.
#include <array>
#include <mutex>

#include "common.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kMaxDevices = 64;

__device__ float zero = 0.0f;

thread_local int known_device = -1;

struct Entry {
  std::once_flag once;
  Device device{};
  const float* zero = nullptr;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

const Entry& entry() {
  static std::array<Entry, kMaxDevices> entries;
  int index = known_device;
  if (index < 0) check(cudaGetDevice(&index), "cudaGetDevice");
  if (index >= kMaxDevices) throw std::runtime_error("more than 64 CUDA devices");
  Entry& e = entries[index];
  std::call_once(e.once, [&] {
    e.device = {index, attribute(cudaDevAttrComputeCapabilityMajor, index),
                attribute(cudaDevAttrComputeCapabilityMinor, index),
                attribute(cudaDevAttrMultiProcessorCount, index)};
    void* address = nullptr;
    check(cudaGetSymbolAddress(&address, zero), "cudaGetSymbolAddress");
    e.zero = static_cast<const float*>(address);
  });
  return e;
}

}  // namespace

KnownDevice::KnownDevice(int index) : before_(known_device) { known_device = index; }

KnownDevice::~KnownDevice() { known_device = before_; }

Device current_device() { return entry().device; }

const float* device_zero() { return entry().zero; }

}  // namespace nvfp4::cuda
