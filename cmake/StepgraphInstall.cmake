# Install rules: headers, library, and packages that find_package(stepgraph CONFIG) and pkg-config find.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(stepgraph_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/stepgraph)

install(TARGETS stepgraph EXPORT stepgraph_targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY layouts DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph FILES_MATCHING PATTERN "*.h")
install(FILES kernels/error.h kernels/export.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph/kernels)
install(FILES pipeline/buffers.h pipeline/geometry.h pipeline/graph.h pipeline/pipeline.h pipeline/stepgraph.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph/pipeline)
install(EXPORT stepgraph_targets NAMESPACE stepgraph:: FILE stepgraphTargets.cmake DESTINATION ${stepgraph_package_dir})

get_target_property(stepgraph_type stepgraph TYPE)
configure_package_config_file(cmake/stepgraphConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfig.cmake
    INSTALL_DESTINATION ${stepgraph_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfig.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfigVersion.cmake
    DESTINATION ${stepgraph_package_dir})

# For builds without CMake. A static library brings what it was made of.
file(RELATIVE_PATH stepgraph_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND -I OUTPUT_VARIABLE stepgraph_pc_cflags)
list(JOIN stepgraph_pc_cflags " " stepgraph_pc_cflags)
cmake_path(GET CUDA_cudart_LIBRARY PARENT_PATH stepgraph_pc_cuda)
set(stepgraph_pc_libs "-L${stepgraph_pc_cuda} -lcudart")
if(stepgraph_type STREQUAL "STATIC_LIBRARY")
  string(APPEND stepgraph_pc_libs " -lcublasLt -lstdc++ -lm")
endif()
configure_file(cmake/stepgraph.pc.in stepgraph.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/stepgraph.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
