// Device memory for the tests: plain, or ending where the mapped memory ends, so that a byte beyond it faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepgraph::test {

/// Untyped device memory. `guarded`: the last byte (rounded up to `alignment`) is the last of a mapped range, and the range
/// behind it is reserved and unmapped.
class DeviceMemory {
public:
    DeviceMemory() = default;
    DeviceMemory(size_t bytes, size_t alignment, bool guarded);
    ~DeviceMemory();
    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;

    /// Null where it holds nothing.
    template <typename Element>
    [[nodiscard]] Element* as() const {
        return static_cast<Element*>(data_);
    }
    [[nodiscard]] size_t bytes() const { return bytes_; }

    template <typename Element>
    void upload(const std::vector<Element>& host) {
        copy_in(host.data(), host.size() * sizeof(Element));
    }
    template <typename Element>
    [[nodiscard]] std::vector<Element> download() const {
        std::vector<Element> host(bytes_ / sizeof(Element));
        copy_out(host.data(), host.size() * sizeof(Element));
        return host;
    }
    void fill(uint8_t byte);

private:
    void copy_in(const void* host, size_t bytes);
    void copy_out(void* host, size_t bytes) const;

    void* data_ = nullptr;
    size_t bytes_ = 0;
    uintptr_t range_ = 0;  // reserved addresses of guarded memory
    size_t mapped_ = 0;
    size_t reserved_ = 0;
    uint64_t handle_ = 0;
};

}  // namespace stepgraph::test
