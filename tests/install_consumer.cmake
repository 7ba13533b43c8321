# Installs the library into an empty folder, builds the examples against it with find_package, a program in C against it with
# pkg-config, and runs them.
# Wants: build_dir, source_dir, work_dir, generator.
file(REMOVE_RECURSE ${work_dir})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()
run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/installed)
foreach(example minimal engine)
  run(${CMAKE_COMMAND} -S ${source_dir}/examples/${example} -B ${work_dir}/${example} -G ${generator}
      -DCMAKE_PREFIX_PATH=${work_dir}/installed -DCMAKE_BUILD_TYPE=Release)
  run(${CMAKE_COMMAND} --build ${work_dir}/${example})
  run(${work_dir}/${example}/${example})
endforeach()

# The C interface, without CMake. It returns 77 where there is no GPU for all of it.
file(GLOB_RECURSE package ${work_dir}/installed/*/stepgraph.pc)
cmake_path(GET package PARENT_PATH package_dir)
set(ENV{PKG_CONFIG_PATH} ${package_dir})
execute_process(COMMAND pkg-config --cflags --libs stepgraph OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(cc -std=c99 ${source_dir}/tests/abi/use_from_c.c -o ${work_dir}/use_from_c ${flags}
    -Wl,-rpath,${package_dir}/..)
execute_process(COMMAND ${work_dir}/use_from_c RESULT_VARIABLE result OUTPUT_VARIABLE said)
if(NOT result MATCHES "^(0|77)$")
  message(FATAL_ERROR "use_from_c returned ${result}: ${said}")
endif()
