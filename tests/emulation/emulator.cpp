#include "emulator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

// Saves the registers that a call must keep, and the stack, and takes those of another fiber.
extern "C" void stepgraph_switch_fiber(void** saved_stack, void* next_stack);
asm(R"(
.text
.globl stepgraph_switch_fiber
.type stepgraph_switch_fiber, @function
stepgraph_switch_fiber:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace stepgraph::emulation {
namespace {

constexpr int lanes = 32;
constexpr size_t stack_bytes = 128 * 1024;
constexpr uint64_t most_switches = 20'000'000;  // of a launch; beyond, it goes in circles
constexpr int most_copies = 128;

/// Pages of memory with one in front of it and one behind it that fault.
class GuardedPages {
public:
    explicit GuardedPages(size_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
        inner_ = (bytes + page_ - 1) / page_ * page_;
        void* all = mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) {
            throw std::bad_alloc();
        }
        all_ = static_cast<unsigned char*>(all);
        if (mprotect(all_ + page_, inner_, PROT_READ | PROT_WRITE) != 0) {
            munmap(all_, inner_ + 2 * page_);
            throw std::bad_alloc();
        }
    }
    ~GuardedPages() { munmap(all_, inner_ + 2 * page_); }
    GuardedPages(const GuardedPages&) = delete;
    GuardedPages& operator=(const GuardedPages&) = delete;

    [[nodiscard]] unsigned char* end() const { return all_ + page_ + inner_; }

private:
    size_t page_;
    size_t inner_ = 0;
    unsigned char* all_ = nullptr;
};

enum class State { ready, looking, at_warp, at_block, at_cluster, gone };

struct Block;
struct Warp;

struct Copy {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
    int batch;

    void run() const { from != nullptr ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes); }
};

struct Product {
    std::function<void()> run;
    int group;
};

struct Thread {
    GuardedPages stack{stack_bytes};
    void* stack_pointer = nullptr;
    Block* block = nullptr;
    Warp* warp = nullptr;
    int number = 0;
    State state = State::ready;
    bool arrived = false;        // at the cluster's barrier, and has not waited yet
    uint64_t arrived_phase = 0;  // of it
    std::array<Copy, most_copies> copies{};
    int copies_started = 0;
    int batches = 0;  // that are committed
    std::vector<Product> products;
    int product_groups = 0;  // that are committed

    [[nodiscard]] int lane() const { return number % lanes; }
};

struct Warp {
    Block* block = nullptr;
    int first_thread = 0;
    uint32_t ready_lanes = 0;
    bool queued = false;
    uint64_t priority = 0;
    // Meetings alternate between two sets of values: those of the last one are still read.
    std::array<std::array<uint32_t, lanes>, 2> values{};
    int turn = 0;
    int met = 0;
    uintptr_t place = 0;
};

struct Block {
    int rank = 0;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::unique_ptr<GuardedPages> shared;
    int live = 0;
    int at_barrier = 0;
    uintptr_t barrier_place = 0;
    int at_partial_barrier = 0;
    uint64_t partial_barriers = 0;  // that are complete
};

class Emulator {
public:
    uint64_t run(const Launch& launch) {
        if (launch.blocks < 1 || launch.blocks > 16 || launch.threads < lanes || launch.threads % lanes != 0) {
            throw std::runtime_error("a launch of " + std::to_string(launch.blocks) + " blocks of " +
                                     std::to_string(launch.threads) + " threads");
        }
        launch_ = launch;
        random_.seed(launch.seed);
        order_ = static_cast<Order>(random_() % 3);
        prepare();
        switch_to(&main_stack_, next_ready());
        if (!fault_.empty()) {
            throw std::runtime_error(fault_);
        }
        return bytes_read_;
    }
    void count_read(size_t bytes) { bytes_read_ += bytes; }

    [[nodiscard]] Thread& current() const { return *current_; }
    [[nodiscard]] const Launch& launch() const { return launch_; }
    [[nodiscard]] unsigned char* shared_of(const Block& block) const {
        return block.shared->end() - (launch_.shared_bytes + 15) / 16 * 16;
    }

    [[noreturn]] void fail(const std::string& what) {
        fault_ =
            what + " (block " + std::to_string(current_->block->rank) + ", thread " + std::to_string(current_->number) + ")";
        void* abandoned = nullptr;
        stepgraph_switch_fiber(&abandoned, main_stack_);
        __builtin_unreachable();
    }

    void wait(State state) {
        Thread* self = current_;
        self->state = state;
        Thread* next = next_ready();
        if (next == nullptr) {
            fail("nobody can go on");
        }
        if (next != self) {
            switch_to(&self->stack_pointer, next);
        } else {
            count_switch();
        }
    }

    void make_ready(Thread& thread) {
        thread.state = State::ready;
        Warp& warp = *thread.warp;
        warp.ready_lanes |= 1U << thread.lane();
        if (!warp.queued) {
            warp.queued = true;
            queue_.push_back(&warp);
        }
    }
    /// Lets others go first.
    void step_back() {
        make_ready(*current_);
        wait(State::ready);
    }
    /// Goes on when nobody else can: whoever looks again and again for what others do must not keep them from it.
    void look_later() {
        looking_.push_back(current_);
        wait(State::looking);
    }

    void block_barrier(uintptr_t place) {
        Block& block = *current_->block;
        if (block.live != launch_.threads) {
            fail("a barrier of the block behind which not all threads are left");
        }
        if (block.at_barrier > 0 && block.barrier_place != place) {
            fail("threads of a block at different barriers");
        }
        block.barrier_place = place;
        if (++block.at_barrier < launch_.threads) {
            wait(State::at_block);
            return;
        }
        block.at_barrier = 0;
        for (int t = 0; t < launch_.threads; ++t) {  // it may hold more, of an earlier launch
            Thread& other = *block.threads[static_cast<size_t>(t)];
            if (&other != current_) {
                make_ready(other);
            }
        }
        step_back();
    }

    void partial_barrier(int threads) {
        Block& block = *current_->block;
        const uint64_t own = block.partial_barriers;
        if (++block.at_partial_barrier == threads) {
            block.at_partial_barrier = 0;
            ++block.partial_barriers;
            return;
        }
        while (block.partial_barriers == own) {
            look_later();
        }
    }

    void cluster_arrive() {
        if (launch_.blocks == 1) {
            fail("a barrier of the cluster by a lone block");
        }
        if (current_->arrived) {
            fail("a second arrival at the cluster's barrier");
        }
        current_->arrived = true;
        current_->arrived_phase = phase_;
        ++arrived_;
        complete_cluster_phase();
    }
    void cluster_wait() {
        if (!current_->arrived) {
            fail("a wait at the cluster's barrier without an arrival");
        }
        if (phase_ == current_->arrived_phase) {
            wait(State::at_cluster);
        }
        current_->arrived = false;
    }
    [[nodiscard]] uint64_t phase() const { return phase_; }
    [[nodiscard]] const Block& block(int rank) const { return *blocks_[static_cast<size_t>(rank)]; }

    const uint32_t* meet_warp(uint32_t value, uintptr_t place) {
        Warp& warp = *current_->warp;
        const auto turn = static_cast<size_t>(warp.turn);
        if (warp.met > 0 && warp.place != place) {
            fail("lanes of a warp at different functions");
        }
        warp.place = place;
        warp.values[turn][static_cast<size_t>(current_->lane())] = value;
        if (++warp.met < lanes) {
            wait(State::at_warp);
        } else {
            warp.met = 0;
            warp.turn ^= 1;
            for (int lane = 0; lane < lanes; ++lane) {
                Thread& other = *warp.block->threads[static_cast<size_t>(warp.first_thread + lane)];
                if (&other != current_) {
                    make_ready(other);
                }
            }
        }
        return warp.values[turn].data();
    }

    void body() {
        try {
            launch_.kernel();
        } catch (const std::exception& error) {
            fail(error.what());
        }
        leave();
    }

private:
    enum class Order { newest_first, random, by_priority };

    static void enter_body();

    void prepare() {
        fault_.clear();
        switches_ = 0;
        current_ = nullptr;
        bytes_read_ = 0;
        phase_ = 0;
        arrived_ = 0;
        live_ = launch_.blocks * launch_.threads;
        queue_.clear();
        looking_.clear();
        while (blocks_.size() < static_cast<size_t>(launch_.blocks)) {
            blocks_.push_back(std::make_unique<Block>());
            blocks_.back()->rank = static_cast<int>(blocks_.size()) - 1;
        }
        for (int b = 0; b < launch_.blocks; ++b) {
            prepare_block(*blocks_[static_cast<size_t>(b)]);
        }
    }

    void prepare_block(Block& block) {
        const auto threads = static_cast<size_t>(launch_.threads);
        while (block.threads.size() < threads) {
            block.threads.push_back(std::make_unique<Thread>());
        }
        if (shared_bytes_ < launch_.shared_bytes) {
            shared_bytes_ = launch_.shared_bytes;
            for (auto& any : blocks_) {
                any->shared = nullptr;
            }
        }
        if (block.shared == nullptr) {
            block.shared = std::make_unique<GuardedPages>(shared_bytes_ + 16);
        }
        for (size_t i = 0; i < launch_.shared_bytes; ++i) {
            shared_of(block)[i] = static_cast<unsigned char>(random_() >> 13U);
        }
        block.live = launch_.threads;
        block.at_barrier = 0;
        block.at_partial_barrier = 0;
        block.warps.assign(threads / lanes, {});
        for (size_t w = 0; w < block.warps.size(); ++w) {
            block.warps[w].block = &block;
            block.warps[w].first_thread = static_cast<int>(w) * lanes;
            block.warps[w].priority = random_();
        }
        for (size_t t = 0; t < threads; ++t) {
            Thread& thread = *block.threads[t];
            thread.block = &block;
            thread.warp = &block.warps[t / lanes];
            thread.number = static_cast<int>(t);
            thread.arrived = false;
            thread.copies_started = 0;
            thread.batches = 0;
            thread.products.clear();
            thread.product_groups = 0;
            // As a call would leave it: six registers, the address to go on at, and none to return to.
            auto* stack = reinterpret_cast<void**>(thread.stack.end() - 64);
            *--stack = nullptr;
            *--stack = reinterpret_cast<void*>(&Emulator::enter_body);
            for (int i = 0; i < 6; ++i) {
                *--stack = nullptr;
            }
            thread.stack_pointer = stack;
            make_ready(thread);
        }
    }

    Thread* next_ready() {
        if (std::all_of(queue_.begin(), queue_.end(), [](const Warp* warp) { return warp->ready_lanes == 0; })) {
            for (Thread* thread : std::exchange(looking_, {})) {
                make_ready(*thread);
            }
        }
        while (!queue_.empty()) {
            const size_t i = choose_warp();
            Warp& warp = *queue_[i];
            if (warp.ready_lanes == 0) {
                warp.queued = false;
                queue_[i] = queue_.back();
                queue_.pop_back();
                continue;
            }
            const int turned = order_ == Order::newest_first ? 0 : static_cast<int>(random_() % lanes);
            const int lane = (std::countr_zero(std::rotr(warp.ready_lanes, turned)) + turned) % lanes;
            warp.ready_lanes &= ~(1U << lane);
            return warp.block->threads[static_cast<size_t>(warp.first_thread + lane)].get();
        }
        return nullptr;
    }
    size_t choose_warp() {
        if (order_ == Order::newest_first) {
            return queue_.size() - 1;
        }
        if (order_ == Order::random) {
            return random_() % queue_.size();
        }
        const auto first = std::max_element(queue_.begin(), queue_.end(),
                                            [](const Warp* a, const Warp* b) { return a->priority < b->priority; });
        return static_cast<size_t>(first - queue_.begin());
    }

    void switch_to(void** saved, Thread* next) {
        if (current_ != nullptr && current_->state != State::gone) {
            count_switch();
        }
        current_ = next;
        stepgraph_switch_fiber(saved, next->stack_pointer);
    }

    void count_switch() {
        if (++switches_ > most_switches) {
            fail("no end in sight");
        }
    }

    void complete_cluster_phase() {
        if (live_ == 0 || arrived_ < live_) {
            return;
        }
        arrived_ = 0;
        ++phase_;
        for (int b = 0; b < launch_.blocks; ++b) {
            for (int t = 0; t < launch_.threads; ++t) {
                Thread& thread = *blocks_[static_cast<size_t>(b)]->threads[static_cast<size_t>(t)];
                if (thread.state == State::at_cluster) {
                    make_ready(thread);
                }
            }
        }
    }

    [[noreturn]] void leave() {
        Thread& self = *current_;
        if (self.arrived) {
            fail("a thread leaves between arrival and wait");
        }
        if (self.copies_started > 0) {
            fail("a thread leaves with copies on their way");
        }
        if (!self.products.empty()) {
            fail("a thread leaves with products that nobody waited for");
        }
        if (self.block->at_barrier > 0) {
            fail("a thread leaves while others wait for it at a barrier");
        }
        self.state = State::gone;
        --self.block->live;
        --live_;
        complete_cluster_phase();
        Thread* next = next_ready();
        if (next == nullptr && live_ > 0) {
            fail("nobody can go on");
        }
        void* abandoned = nullptr;
        if (next != nullptr) {
            switch_to(&abandoned, next);
        }
        stepgraph_switch_fiber(&abandoned, main_stack_);
        __builtin_unreachable();
    }

    Launch launch_;
    std::mt19937_64 random_;
    Order order_ = Order::random;
    std::vector<std::unique_ptr<Block>> blocks_;  // kept from launch to launch
    size_t shared_bytes_ = 0;
    std::vector<Warp*> queue_;      // those with ready lanes, and some without
    std::vector<Thread*> looking_;  // see look_later()
    Thread* current_ = nullptr;
    void* main_stack_ = nullptr;
    std::string fault_;
    uint64_t switches_ = 0;
    uint64_t bytes_read_ = 0;
    uint64_t phase_ = 0;
    int arrived_ = 0;
    int live_ = 0;
};

Emulator& emulator() {
    static Emulator all;
    return all;
}

void Emulator::enter_body() {
    emulator().body();
}

}  // namespace

uint64_t run(const Launch& launch) {
    return emulator().run(launch);
}

namespace {
std::mt19937_64 launch_seeds;
}
void seed_launches(uint64_t seed) {
    launch_seeds.seed(seed);
}
uint64_t seed_of_launch() {
    return launch_seeds();
}

int thread() {
    return emulator().current().number;
}
int cluster_rank() {
    return emulator().current().block->rank;
}
int cluster_blocks() {
    return emulator().launch().blocks;
}
unsigned cluster_number() {
    return emulator().launch().cluster_number;
}
unsigned grid_blocks() {
    return emulator().launch().grid_blocks;
}
void* shared_memory() {
    return emulator().shared_of(*emulator().current().block);
}

uint32_t shared_address(const void* byte) {
    const auto offset = static_cast<const unsigned char*>(byte) - static_cast<unsigned char*>(shared_memory());
    if (offset < 0 || static_cast<size_t>(offset) >= emulator().launch().shared_bytes) {
        emulator().fail("an address outside of shared memory");
    }
    return static_cast<uint32_t>(offset);
}

const void* in_block(uint32_t shared_address, int rank, size_t bytes) {
    Emulator& all = emulator();
    if (rank < 0 || rank >= all.launch().blocks || shared_address + bytes > all.launch().shared_bytes ||
        shared_address % bytes != 0) {
        all.fail("a wrong address in another block");
    }
    const Block& block = all.block(rank);
    if (block.live < all.launch().threads) {
        all.fail("a read from a block of which a thread has left");
    }
    if (all.phase() == 0) {
        all.fail("a read from another block before any barrier of the cluster");
    }
    return all.shared_of(block) + shared_address;
}

void look_later() {
    emulator().look_later();
}
void block_barrier(uintptr_t place) {
    emulator().block_barrier(place);
}
void partial_barrier(int threads) {
    emulator().partial_barrier(threads);
}
void cluster_arrive() {
    emulator().cluster_arrive();
}
void cluster_wait() {
    emulator().cluster_wait();
}
const uint32_t* meet_warp(uint32_t value, uintptr_t place) {
    return emulator().meet_warp(value, place);
}

void fail(const char* what) {
    emulator().fail(what);
}

void check_readable(const void* from, size_t bytes, size_t alignment) {
    const auto* first = static_cast<const std::byte*>(from);
    const auto& readable = emulator().launch().readable;
    if (!emulator().launch().all_is_readable &&
        std::none_of(readable.begin(), readable.end(), [&](std::span<const std::byte> span) {
            return first >= span.data() && first + bytes <= span.data() + span.size();
        })) {
        emulator().fail("a read outside of the memory that was given");
    }
    if (reinterpret_cast<uintptr_t>(from) % alignment != 0) {
        emulator().fail("a read that is not aligned");
    }
    emulator().count_read(bytes);
}

void start_copy(void* to, const void* from, size_t bytes) {
    if (from != nullptr) {
        check_readable(from, bytes, bytes);
    }
    if (shared_address(to) % bytes != 0) {
        emulator().fail("a copy that is not aligned");
    }
    Thread& thread = emulator().current();
    if (thread.copies_started == most_copies) {
        emulator().fail("more copies on their way than this emulation holds");
    }
    thread.copies[static_cast<size_t>(thread.copies_started++)] = {to, from, bytes, thread.batches};
}

void commit_copies() {
    ++emulator().current().batches;
}

void finish_batches(int left) {
    Thread& thread = emulator().current();
    int kept = 0;
    for (int i = 0; i < thread.copies_started; ++i) {
        const Copy copy = thread.copies[static_cast<size_t>(i)];
        if (copy.batch < thread.batches - left) {
            copy.run();
        } else {
            thread.copies[static_cast<size_t>(kept++)] = copy;
        }
    }
    thread.copies_started = kept;
}

void finish_copies() {
    commit_copies();
    finish_batches(0);
}

void start_product(std::function<void()> product) {
    Thread& thread = emulator().current();
    thread.products.push_back({std::move(product), thread.product_groups});
}

void commit_products() {
    ++emulator().current().product_groups;
}

void finish_products(int left) {
    Thread& thread = emulator().current();
    const auto last = std::find_if(thread.products.begin(), thread.products.end(),
                                   [&](const Product& p) { return p.group >= thread.product_groups - left; });
    std::vector<Product> finished(std::make_move_iterator(thread.products.begin()), std::make_move_iterator(last));
    thread.products.erase(thread.products.begin(), last);
    for (const Product& product : finished) {
        product.run();
    }
}

}  // namespace stepgraph::emulation
