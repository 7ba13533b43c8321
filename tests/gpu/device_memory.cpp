#include "device_memory.h"

#include <stdexcept>
#include <string>
#include <utility>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stepgraph/kernels/driver_function.h>

namespace stepgraph::test {
namespace {

void check_driver(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error(std::string(call) + " failed with " + std::to_string(result));
    }
}

#define DRIVER_CALL(function, ...) check_driver(driver_function<decltype(&function)>(#function)(__VA_ARGS__), #function)

}  // namespace

DeviceMemory::DeviceMemory(size_t bytes, size_t alignment, bool guarded) : bytes_(bytes) {
    if (bytes == 0) {
        return;
    }
    if (!guarded) {
        check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
        return;
    }
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaFree(nullptr), "cudaFree");  // makes the context
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    size_t granularity = 0;
    DRIVER_CALL(cuMemGetAllocationGranularity, &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    mapped_ = (rounded + granularity - 1) / granularity * granularity;
    reserved_ = mapped_ + granularity;

    CUdeviceptr range = 0;
    CUmemGenericAllocationHandle handle = 0;
    DRIVER_CALL(cuMemAddressReserve, &range, reserved_, granularity, 0, 0);
    DRIVER_CALL(cuMemCreate, &handle, mapped_, &properties, 0);
    DRIVER_CALL(cuMemMap, range, mapped_, 0, handle, 0);
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER_CALL(cuMemSetAccess, range, mapped_, &access, 1);
    range_ = range;
    handle_ = handle;
    data_ = reinterpret_cast<void*>(range + mapped_ - rounded);
}

DeviceMemory::~DeviceMemory() {
    if (range_ == 0) {
        cudaFree(data_);
        return;
    }
    cudaDeviceSynchronize();
    driver_function<decltype(&cuMemUnmap)>("cuMemUnmap")(range_, mapped_);
    driver_function<decltype(&cuMemRelease)>("cuMemRelease")(handle_);
    driver_function<decltype(&cuMemAddressFree)>("cuMemAddressFree")(range_, reserved_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept {
    *this = std::move(other);
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(range_, other.range_);
    std::swap(mapped_, other.mapped_);
    std::swap(reserved_, other.reserved_);
    std::swap(handle_, other.handle_);
    return *this;
}

void DeviceMemory::fill(uint8_t byte) {
    if (data_ != nullptr) {
        check_cuda(cudaMemset(data_, byte, bytes_), "cudaMemset");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
}

void DeviceMemory::copy_in(const void* host, size_t bytes) {
    if (bytes != 0) {
        check_cuda(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
}

void DeviceMemory::copy_out(void* host, size_t bytes) const {
    if (bytes != 0) {
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check_cuda(cudaMemcpy(host, data_, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
}

}  // namespace stepgraph::test
