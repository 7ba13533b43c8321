// The demonstration and a trace on the GPU: steps of the captured graphs against the reference.
#include <stepgraph/tools/demo_command.h>
#include <stepgraph/tools/trace_command.h>

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

class TraceOnDevice : public GpuTest {};

TEST_F(TraceOnDevice, IsRightInTheStepsThatAreChecked) {
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::mxfp4}) {
        EXPECT_EQ(tools::trace({.trace = STEPGRAPH_TEST_DATA "/../../tools/data/conversation_trace.csv",
                                .device = tools::Device::cuda,
                                .format = format,
                                .steps = 300,
                                .layers = 2,
                                .rows = 24,
                                .shrink = 4,
                                .check = 4}),
                  0);
    }
}

}  // namespace
}  // namespace stepgraph::test
