#include "program.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include <CLI/CLI.hpp>

#include <stepgraph/tools/read_ceiling.h>

namespace stepgraph::bench {

void add_cell(const std::string& name, std::function<void(benchmark::State&)> measure) {
    benchmark::RegisterBenchmark(name.c_str(), std::move(measure))
        ->UseManualTime()
        ->Iterations(11)
        ->Unit(benchmark::kMicrosecond);
}

std::vector<double> times_of(benchmark::State& state, Replays& replays) {
    std::vector<double> times;
    for (auto _ : state) {
        times.push_back(replays.time_us());
        state.SetIterationTime(times.back() * 1e-6);
    }
    return times;
}

int run_program(int argc, char** argv, const Program& program) {
    CLI::App app(program.description + " Further arguments go to Google Benchmark, such as --benchmark_filter=REGEX.");
    bool core = false;
    std::string out;
    std::string revision = "unknown";
    std::string driver = "unknown";
    app.add_flag("--core", core, program.core);
    app.add_option("--out", out, "Write the results there, as JSON");
    app.add_option("--revision", revision, "Of the sources, for the JSON");
    app.add_option("--driver", driver, "Version of the GPU's driver, for the JSON");
    app.allow_extras();
    CLI11_PARSE(app, argc, argv);
    std::vector<std::string> rest = app.remaining();
    std::vector<char*> arguments{argv[0]};
    std::transform(rest.begin(), rest.end(), std::back_inserter(arguments), [](std::string& s) { return s.data(); });
    int count = static_cast<int>(arguments.size());
    benchmark::Initialize(&count, arguments.data());
    if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) {
        return 1;
    }
    try {
        const std::string reason = program.why_not();
        if (!reason.empty()) {
            std::fprintf(stderr, "%s cannot run here: %s\n", argv[0], reason.c_str());
            return 1;
        }
        Report report(revision, driver, tools::read_ceiling_tb_s());
        program.run(report, core);
        if (!out.empty()) {
            report.write(out);
        }
        const auto& rows = report.json()["rows"];
        return std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row["mismatches"] != 0; }) ? 1 : 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 1;
    }
}

}  // namespace stepgraph::bench
