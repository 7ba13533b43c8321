// Device memory that the command, the tests and the benchmarks own.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>

namespace stepgraph::tools {

/// `size()` elements of device memory. Movable, not copyable. Copies and fills are complete on return. Throws Error(cuda).
template <typename Element>
class DeviceBuffer {
public:
    DeviceBuffer() = default;
    explicit DeviceBuffer(size_t size) : size_(size) {
        check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(Element) + 1), "cudaMalloc");
    }
    explicit DeviceBuffer(const std::vector<Element>& host) : DeviceBuffer(host.size()) { upload(host); }
    ~DeviceBuffer() { cudaFree(data_); }
    DeviceBuffer(DeviceBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    /// Null where the buffer is empty: an input or output that is not handed over.
    [[nodiscard]] Element* data() const { return size_ == 0 ? nullptr : data_; }
    [[nodiscard]] size_t size() const { return size_; }

    /// Copies the first host.size() elements; host.size() <= size().
    void upload(const std::vector<Element>& host) {
        check_cuda(cudaMemcpy(data_, host.data(), host.size() * sizeof(Element), cudaMemcpyHostToDevice), "cudaMemcpy");
        synchronise();
    }
    [[nodiscard]] std::vector<Element> download() const {
        synchronise();
        std::vector<Element> host(size_);
        check_cuda(cudaMemcpy(host.data(), data_, size_ * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return host;
    }
    /// Fills with a byte that no result has everywhere, so that what was not written shows.
    void poison(int byte = 0xA5) {
        check_cuda(cudaMemset(data_, byte, size_ * sizeof(Element)), "cudaMemset");
        synchronise();
    }

private:
    /// Copies of pageable memory and fills may return before they are done, and streams of ours do not wait for them.
    static void synchronise() { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

    Element* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace stepgraph::tools
