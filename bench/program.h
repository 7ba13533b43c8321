// The command line that the benchmarks of the stages share.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "report.h"

namespace stepgraph::bench {

struct Program {
    std::string description;  // one sentence
    std::string core;         // what --core measures, and what is measured without it
    /// Why it cannot run on this machine; empty where it can.
    std::function<std::string()> why_not;
    /// Registers the cells, the core ones or all of them, runs them and prints a table.
    std::function<void(Report&, bool core)> run;
};

/// The cells in the order of their names, each once.
template <typename Cell>
std::vector<Cell> each_once(std::vector<Cell> cells) {
    std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) { return a.name() < b.name(); });
    cells.erase(std::unique(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) { return a.name() == b.name(); }),
                cells.end());
    return cells;
}

/// Registers a cell, measured eleven times.
void add_cell(const std::string& name, std::function<void(benchmark::State&)> measure);
/// The times of a cell's measurements, in microseconds, which Google Benchmark is told too.
std::vector<double> times_of(benchmark::State& state, Replays& replays);

/// Parses --core, --out, --revision and --driver, hands the rest to Google Benchmark, runs and writes the results. Returns
/// 1, with a sentence on stderr, where it cannot run, where something failed, and where a result was wrong.
int run_program(int argc, char** argv, const Program& program);

}  // namespace stepgraph::bench
