# Installs the library into an empty folder, builds the examples against it with find_package, a program in C against it with
# pkg-config, and runs them.
# Wants: build_dir, source_dir, work_dir, generator.
include(${CMAKE_CURRENT_LIST_DIR}/run_or_fail.cmake)
file(REMOVE_RECURSE ${work_dir})
run_or_fail(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/installed)
foreach(example minimal engine)
  run_or_fail(${CMAKE_COMMAND} -S ${source_dir}/examples/${example} -B ${work_dir}/${example} -G ${generator}
      -DCMAKE_PREFIX_PATH=${work_dir}/installed -DCMAKE_BUILD_TYPE=Release)
  run_or_fail(${CMAKE_COMMAND} --build ${work_dir}/${example})
  run_or_fail(${work_dir}/${example}/${example})
endforeach()

# A project in C alone is told what it lacks to link a static library of C++.
file(GLOB_RECURSE static ${work_dir}/installed/*/libstepgraph.a)
file(WRITE ${work_dir}/in_c_alone/CMakeLists.txt
    "cmake_minimum_required(VERSION 3.25)\nproject(in_c_alone LANGUAGES C)\nfind_package(stepgraph CONFIG REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${work_dir}/in_c_alone -B ${work_dir}/in_c_alone/build -G ${generator}
    -DCMAKE_PREFIX_PATH=${work_dir}/installed RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE said)
string(REGEX REPLACE "[ \n]+" " " said "${said}")
if(static AND NOT said MATCHES "languages of the project are C, must include CXX" OR NOT static AND NOT result EQUAL 0)
  message(FATAL_ERROR "a project in C alone was told: ${said}")
endif()

# The C interface, without CMake. It returns 77 where there is no GPU for all of it.
file(GLOB_RECURSE package ${work_dir}/installed/*/stepgraph.pc)
cmake_path(GET package PARENT_PATH package_dir)
set(ENV{PKG_CONFIG_PATH} ${package_dir})
execute_process(COMMAND pkg-config --cflags --libs stepgraph OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run_or_fail(cc -std=c99 ${source_dir}/tests/abi/use_from_c.c -o ${work_dir}/use_from_c ${flags}
    -Wl,-rpath,${package_dir}/..)
execute_process(COMMAND ${work_dir}/use_from_c RESULT_VARIABLE result OUTPUT_VARIABLE said)
if(NOT result MATCHES "^(0|77)$")
  message(FATAL_ERROR "use_from_c returned ${result}: ${said}")
endif()
