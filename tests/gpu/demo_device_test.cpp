// The demonstration on the GPU: every step of the captured graph against the reference.
#include <stepgraph/tools/demo_command.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

class DemoOnDevice : public GpuTest {};

TEST_F(DemoOnDevice, IsRightInEveryFormat) {
    for (const CacheFormat format :
         {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        for (const bool portable_scorer : {false, true}) {
            EXPECT_EQ(tools::demo({.device = tools::Device::cuda,
                                   .format = format,
                                   .steps = 35,
                                   .requests = 6,
                                   .portable_scorer = portable_scorer}),
                      0);
        }
    }
}

}  // namespace
}  // namespace stepgraph::test
