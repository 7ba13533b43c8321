// An array with an unmapped page right behind it: reading one element too many faults instead of passing.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

namespace stepgraph::test {

template <typename Element>
class GuardedArray {
    static_assert(std::is_trivially_copyable_v<Element>);

public:
    explicit GuardedArray(const std::vector<Element>& elements) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t bytes = elements.size() * sizeof(Element);
        mapped_ = (bytes + page - 1) / page * page + page;
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) {
            throw std::bad_alloc();
        }
        char* const guard = static_cast<char*>(base_) + mapped_ - page;
        mprotect(guard, page, PROT_NONE);
        data_ = reinterpret_cast<Element*>(guard - bytes);
        std::copy(elements.begin(), elements.end(), data_);
    }
    ~GuardedArray() { munmap(base_, mapped_); }
    GuardedArray(const GuardedArray&) = delete;
    GuardedArray& operator=(const GuardedArray&) = delete;

    [[nodiscard]] Element* data() const { return data_; }

private:
    void* base_ = nullptr;
    size_t mapped_ = 0;
    Element* data_ = nullptr;
};

}  // namespace stepgraph::test
