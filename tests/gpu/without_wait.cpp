// Compiled with `stepgraph` defined as `stepgraph_without_wait`, as the kernels it calls: the build rule does both.
#include <stepgraph/kernels/index_inputs.h>
#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/kernels/select.h>
#include <stepgraph/kernels/select_sm90.h>

namespace broken = stepgraph;  // here: stepgraph_without_wait
#undef stepgraph

namespace stepgraph::test {

void schedule_without_wait(const void* args, cudaStream_t stream) {
    broken::schedule(*static_cast<const broken::ScheduleArgs*>(args), {stream, true});
}

void index_inputs_without_wait(const void* args, cudaStream_t stream) {
    broken::index_inputs(*static_cast<const broken::IndexInputsArgs*>(args), {stream, true});
}

void project_sm90_without_wait(const void* args, cudaStream_t stream) {
    const auto& project_args = *static_cast<const broken::ProjectArgs*>(args);
    broken::prepare_project_sm90(project_args);
    broken::project_sm90(project_args, {stream, true});
}

void score_without_wait(const void* args, int blocks, cudaStream_t stream) {
    const auto& score_args = *static_cast<const broken::ScoreArgs*>(args);
    broken::prepare_score();
    broken::score(score_args, blocks, {stream, true});
}

void score_sm90_without_wait(const void* args, int blocks, cudaStream_t stream) {
    const auto& score_args = *static_cast<const broken::ScoreArgs*>(args);
    broken::prepare_score_sm90(score_args.format, score_args.heads);
    broken::score_sm90(score_args, blocks, {stream, true});
}

void select_without_wait(const void* args, cudaStream_t stream) {
    broken::select(*static_cast<const broken::SelectArgs*>(args), {stream, true});
}

void select_sm90_without_wait(const void* args, cudaStream_t stream) {
    broken::prepare_select_sm90();
    broken::select_sm90(*static_cast<const broken::SelectArgs*>(args), {stream, true});
}

}  // namespace stepgraph::test
