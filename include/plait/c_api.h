/* plait from C, or from anything that can call C: the same plan and run as plait/attention.h, with
 * raw pointers and strides instead of tensors. No other header of plait is needed.
 *
 *   plait_config config;
 *   plait_config_init(&config);                  // then set heads, dims, dtype, format, bounds
 *   plait_attention* attention = NULL;
 *   if (plait_attention_create(&config, &attention)) puts(plait_last_error());
 *   plait_plan(attention, &batch, stream);       // once a step
 *   plait_run(attention, &args, stream);         // once a layer
 *   plait_attention_destroy(attention);
 *
 * Every struct is first given to its plait_..._init, which sets struct_size and the defaults; the
 * fields that follow may stay as they are where their comment says so. Pointers are borrowed for
 * the call alone, but tables on a device, which must live as long as the plan is run.
 * Strides are in elements. Where all strides of a tensor are 0, it is dense. The elements of a head
 * are always dense. Index arrays are dense int32 but slot_mapping (int64); they lie on the host
 * unless `on_device` says otherwise.
 * Functions return PLAIT_OK, or an error whose text plait_last_error() has; after an error nothing
 * has been written, launched or replaced. An attention, and a workspace, must not be used by two
 * threads at once; different ones may. */
#ifndef PLAIT_C_API_H_
#define PLAIT_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t plait_status;
enum {
  PLAIT_OK = 0,
  PLAIT_INVALID_ARGUMENT = 1, /* the caller's: the text names argument, place and value */
  PLAIT_FAILURE = 2           /* the environment's: no driver, no compiler, no memory */
};
enum { PLAIT_FLOAT32 = 0, PLAIT_BFLOAT16 = 1, PLAIT_FLOAT16 = 2 };
/* Of K and V alone. Value = stored number * scale. */
enum { PLAIT_AS_DTYPE = -1, PLAIT_FLOAT8_E4M3FN = 3, PLAIT_FLOAT8_E5M2 = 4 };
enum { PLAIT_CPU = 1, PLAIT_CUDA = 2 };      /* DLPack's codes */
enum { PLAIT_RAGGED = 0, PLAIT_PAGED = 1 };
enum {
  PLAIT_SCHEDULE_AUTO = 0,
  PLAIT_SCHEDULE_LPT = 1,
  PLAIT_SCHEDULE_UNSPLIT = 2,
  PLAIT_SCHEDULE_PREFIX_SUM = 3
};

/* Text of the last error on this thread; "" if there was none. Valid until the next error. */
const char* plait_last_error(void);
/* "0.1.0" */
const char* plait_version(void);

/* A variant's parameter. In a config: what its struct is compiled with; in run: its value. */
enum { PLAIT_PARAM_FLOAT = 0, PLAIT_PARAM_INT = 1, PLAIT_PARAM_TENSOR = 2 };
typedef struct plait_param {
  const char* name;
  int32_t kind;             /* read in a config only */
  double number;            /* of FLOAT and INT */
  const float* tensor;      /* of TENSOR, in run only: on the device of the attention */
  int64_t num_elements;     /* of tensor */
} plait_param;

typedef struct plait_config {
  size_t struct_size;
  int32_t num_qo_heads, num_kv_heads;      /* num_qo_heads is a multiple of num_kv_heads */
  int32_t head_dim_qk, head_dim_vo;        /* multiples of 8 up to 256 */
  int32_t dtype;                           /* of q and out; default bfloat16 */
  int32_t kv_dtype;                        /* of K and V; default as dtype */
  int32_t device_type, device_id;          /* default the cpu */
  /* KV format. */
  int32_t kv_kind;                         /* default ragged */
  int32_t page_size;                       /* default 1 */
  int32_t hnd;                             /* pages are [head, page_size, dim]; default 0 */
  int32_t num_levels;                      /* > 1: composed of levels; default 1 */
  /* Bounds: capacities, all at least 1 but the last two. */
  int32_t max_requests, max_query_tokens;  /* of a step */
  int32_t max_keys;                        /* of a request */
  int32_t max_q_len;                       /* of a request; 0: max_query_tokens */
  int64_t max_total_pages;                 /* host page tables; 0: as many as the others allow */
  /* Which keys a query sees: default all. */
  int32_t causal;
  int32_t window_left;                     /* -1: no window (default) */
  int32_t sink_tokens;
  int32_t custom_mask;                     /* every plan brings mask bits; default 0 */
  /* What is done to rows and logits, in this order; plait/variant.h says what each means. */
  float rms_norm_q_eps, rms_norm_k_eps;    /* > 0: on, run takes q_norm_weight, k_norm_weight */
  int32_t rope;                            /* default 0; with the fields below where it is 1 */
  int32_t rope_interleave, rope_rotary_dim, rope_old_context_len; /* default 0 */
  double rope_theta, rope_scale;           /* default 10000, 1 */
  double rope_low_freq_factor, rope_high_freq_factor; /* default 1, 4 */
  int32_t alibi;                           /* run takes slopes; default 0 */
  float soft_cap;                          /* 0: none (default) */
  /* A variant of the caller's own: C++ text; see kernels/host_device/variant.h. Default: none. */
  const char *variant_name, *variant_struct, *variant_source;
  const plait_param* variant_params;
  int32_t num_variant_params;
  int32_t variant_without_softmax;         /* as the struct's kUseSoftmax = false */
  float sm_scale;                          /* 0: 1 / sqrt(head_dim_qk) (default) */
  const char* kernel;                      /* NULL: "auto" (default) */
  int32_t scheduler;
  int32_t max_ctas;                        /* 0: the whole device (default) */
  int32_t chunk_keys;                      /* invariant mode, in chunks of so many keys: 512, 1024
                                            * or 2048; a row's bits then depend on its own query
                                            * and keys alone. 0: off (default) */
  /* Memory for partial states: NULL: allocated. Else 256-byte aligned, on the device, and alive as
   * long as the attention; plait_workspace_bytes() says how much. */
  void* workspace;
  int64_t workspace_bytes;
} plait_config;
void plait_config_init(plait_config* config);

typedef struct plait_attention plait_attention;

/* Bytes of workspace that an attention of this configuration needs. Compiles nothing. */
plait_status plait_workspace_bytes(const plait_config* config, int64_t* bytes);
/* Compiles and loads the kernels. `attention` is set only on PLAIT_OK. */
plait_status plait_attention_create(const plait_config* config, plait_attention** attention);
void plait_attention_destroy(plait_attention* attention); /* NULL is taken */
/* What runs: "cpu ...", "plain ...", "sm80 ...", "sm90 ...". Valid until the attention is
 * destroyed. */
const char* plait_kernel_name(const plait_attention* attention);

/* Which of a table's arrays are on the device. */
enum {
  PLAIT_ON_DEVICE_PAGE_INDPTR = 1,
  PLAIT_ON_DEVICE_PAGE_INDICES = 2,
  PLAIT_ON_DEVICE_BLOCK_TABLE = 4,
  PLAIT_ON_DEVICE_REQUEST_MAP = 8,
  /* All arrays of the tables, and plait_batch.qo_indptr too: the lengths are planned there. Only in
   * plait_batch.kv of a flat format; no q_positions, no mask. */
  PLAIT_ON_DEVICE_LENGTHS = 16
};
/* The keys of n requests (in a level: nodes). NULL: not given. */
typedef struct plait_kv_tables {
  size_t struct_size;
  /* "host": or with all others on the device, PLAIT_ON_DEVICE_LENGTHS. */
  const int32_t* kv_len;            /* [n] host */
  /* Ragged: kv_indptr, or kv_begin and kv_len. */
  const int32_t* kv_indptr;         /* [n + 1] host */
  const int32_t* kv_begin;          /* [n] host */
  /* Paged: the first two and one of the lengths, or block_table and kv_len. */
  const int32_t* kv_page_indptr;    /* [n + 1] */
  const int32_t* kv_page_indices;   /* [num_page_indices] */
  int64_t num_page_indices;
  const int32_t* kv_last_page_len;  /* [n] host */
  const int32_t* block_table;       /* [block_table_rows, block_table_columns] */
  int64_t block_table_rows, block_table_columns;
  int64_t block_table_stride_row, block_table_stride_column;
  const int32_t* request_map;       /* [n] row of block_table of each request; may be NULL */
  int32_t on_device;                /* PLAIT_ON_DEVICE_... */
} plait_kv_tables;
void plait_kv_tables_init(plait_kv_tables* tables);

/* One level of a composed format. */
typedef struct plait_level {
  plait_kv_tables tables;
  int32_t num_nodes;
  const int32_t* node_indptr;       /* [num_nodes + 1] host; NULL: node i is request i */
  const int32_t* node_requests;     /* [node_indptr[num_nodes]] host */
} plait_level;

/* What requests have in common, as levels for plait_plan: plait/compose_radix.h. Host arrays. */
typedef struct plait_radix_args {
  size_t struct_size;
  int32_t num_requests;
  const int32_t* qo_indptr;         /* [num_requests + 1], as in plait_batch */
  int32_t max_levels;               /* that are used; 0: all of the attention's format (default) */
  /* A radix tree, `tables` being those of its nodes ... */
  int32_t num_nodes;
  const int32_t* node_parent;       /* [num_nodes]: another node, or -1 at the root */
  const int32_t* request_node;      /* [num_requests]: where it ends; -1: it has no keys */
  /* ... or block hashes, `tables` being those of the requests. */
  const int32_t* hash_indptr;       /* [num_requests + 1], from 0 */
  const int64_t* hash_ids;          /* [hash_indptr[num_requests]] */
  const int32_t* hashed_len;        /* [num_requests]; NULL: all blocks are full */
  int32_t block_tokens;
  plait_kv_tables tables;
} plait_radix_args;
void plait_radix_args_init(plait_radix_args* args);

typedef struct plait_levels plait_levels;
/* Weighed by what `attention`, of a format with two levels or more, knows of its device. `levels`
 * is set only on PLAIT_OK, and owns its arrays. */
plait_status plait_compose_radix(const plait_attention* attention, const plait_radix_args* args,
                                 plait_levels** levels);
void plait_levels_destroy(plait_levels* levels); /* NULL is taken */

typedef struct plait_batch {
  size_t struct_size;
  int32_t num_requests;
  const int32_t* qo_indptr;         /* [num_requests + 1] host, from 0, not decreasing */
  plait_kv_tables kv;               /* of a format with one level */
  const plait_level* levels;        /* [num_levels] of a composed format */
  int32_t num_levels;
  const plait_levels* composed;     /* instead of levels: those of plait_compose_radix */
  /* Of a config with custom_mask: MaskTables in plait/kv_format.h. Bits of q_len rows of kv_len -
   * first_masked_key keys a request, each request in a new byte, one after the other. */
  const uint8_t* mask_bits;         /* [num_mask_bytes] host, or device where mask_on_device */
  int64_t num_mask_bytes;
  int32_t mask_on_device;
  const int32_t* first_masked_key;  /* [num_requests] host; NULL: 0 */
  const int32_t* q_positions;       /* [query tokens] host; NULL: the last query at the last key */
} plait_batch;
void plait_batch_init(plait_batch* batch);

/* Once a step. `stream`: a CUstream, NULL is the default stream; unused on the cpu. */
plait_status plait_plan(plait_attention* attention, const plait_batch* batch, void* stream);
/* What the plan shares between requests and why: a table, or one JSON object. Valid until the next
 * call; NULL where nothing is planned (plait_last_error() says so). */
const char* plait_explain(plait_attention* attention, int32_t json);

typedef struct plait_run_args {
  size_t struct_size;
  int64_t num_rows;              /* of q, out, lse; >= planned tokens, the rest comes out 0, -inf */
  const void* q;                    /* [num_rows, num_qo_heads, head_dim_qk] */
  int64_t q_stride_token, q_stride_head;
  int64_t num_kv_blocks;            /* pages of the cache; ragged: rows of K and V */
  const void *k, *v;                /* ragged [rows, heads, dim]; paged as the config says */
  int64_t k_stride_page, k_stride_token, k_stride_head; /* page: not read where ragged */
  int64_t v_stride_page, v_stride_token, v_stride_head;
  void* out;                        /* [num_rows, num_qo_heads, head_dim_vo] */
  int64_t out_stride_token, out_stride_head;
  float* lse;                       /* [num_rows, num_qo_heads], natural log; NULL: not written */
  int64_t lse_stride_token, lse_stride_head;
  float sm_scale;                   /* 0: the configuration's */
  float k_scale, v_scale;           /* of fp8 K and V; default 1 */
  const plait_param* params;        /* values for this run; tensors are always needed */
  int32_t num_params;
} plait_run_args;
void plait_run_args_init(plait_run_args* args);

/* Once a layer, any number of times a plan. */
plait_status plait_run(plait_attention* attention, const plait_run_args* args, void* stream);

/* Joins the attention states of disjoint key sets: see merge_states in plait/attention.h. */
typedef struct plait_merge_args {
  size_t struct_size;
  int32_t dtype;                    /* of v and out */
  int32_t device_type, device_id;   /* default the cpu */
  int64_t num_rows, num_states, num_heads, head_dim;
  const void* v;                    /* [num_rows, num_states, num_heads, head_dim] */
  int64_t v_stride_row, v_stride_state, v_stride_head;
  const float* lse;                 /* [num_rows, num_states, num_heads] */
  int64_t lse_stride_row, lse_stride_state, lse_stride_head;
  void* out;                        /* [num_rows, num_heads, head_dim] */
  int64_t out_stride_row, out_stride_head;
  float* out_lse;                   /* [num_rows, num_heads] */
  int64_t out_lse_stride_row, out_lse_stride_head;
} plait_merge_args;
void plait_merge_args_init(plait_merge_args* args);
plait_status plait_merge_states(const plait_merge_args* args, void* stream);

/* Writes new tokens' K and V into a cache: see append_kv in plait/attention.h. */
typedef struct plait_append_args {
  size_t struct_size;
  int32_t dtype;                    /* of k_new and v_new; default bfloat16 */
  int32_t kv_dtype;                 /* of the cache; default as dtype. fp8: value / scale */
  float k_scale, v_scale;           /* default 1 */
  int32_t device_type, device_id;   /* default the cpu */
  int32_t kv_kind, page_size, hnd;
  int32_t num_kv_heads, head_dim_qk, head_dim_vo;
  int64_t num_tokens;
  const void *k_new, *v_new;        /* [num_tokens, num_kv_heads, dim] */
  int64_t k_new_stride_token, k_new_stride_head, v_new_stride_token, v_new_stride_head;
  int64_t num_kv_blocks;            /* pages of the cache; ragged: rows */
  void *k_cache, *v_cache;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  int64_t v_stride_page, v_stride_token, v_stride_head;
  /* Where: the slot of each token, -1: skipped ... */
  const int64_t* slot_mapping;      /* [num_tokens] */
  /* ... or its request (-1: skipped) and position, through tables. */
  const int32_t* batch_indices;     /* [num_tokens] */
  const int32_t* positions;         /* [num_tokens] */
  int32_t num_requests;             /* of the tables */
  plait_kv_tables tables;
  int32_t places_on_device;         /* slot_mapping, batch_indices, positions (tables: on_device) */
} plait_append_args;
void plait_append_args_init(plait_append_args* args);
plait_status plait_append_kv(const plait_append_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* PLAIT_C_API_H_ */
