// The schedule without a GPU: the kernel's own code in the emulator.
#include <random>
#include <string>
#include <vector>

#include "../schedule_case.h"
#include "emulator.h"
#include "fresh_seed.h"

namespace stepgraph::test {
namespace {

TEST(ScheduleEmulated, HoldsEveryPageOfEveryPassOnce) {
    const uint64_t seed = fresh_seed();
    std::mt19937_64 random(seed);
    emulation::seed_launches(seed);
    check_schedules(random, [](const ScheduleCase& c) {
        Schedule made{{-1, -1},
                      std::vector<ScorePiece>(c.all_pieces(), {-7, -7, -7, -7, -7, -7, -7, -7}),
                      std::vector<int32_t>(static_cast<size_t>(c.tiles()), -7)};
        ScheduleArgs args = c.args();
        args.starts = c.starts.data();
        args.row_request = c.row_request.data();
        args.ends = c.ends.data();
        args.block_table = c.table.data();
        args.shape = c.fixed_tiles ? nullptr : &made.shape;
        args.pieces = made.pieces.data();
        args.drawn = made.drawn.data();
        schedule(args, {});
        return made;
    });
}

}  // namespace
}  // namespace stepgraph::test
