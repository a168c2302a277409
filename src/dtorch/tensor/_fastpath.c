/* The hot path of tensor/dispatch.py in C: a planned call whose plan is known and whose results need only wrappers.

   What is anything else (an operator with a handler, a plain tensor among the arguments, a linked view, a plan not made
   yet, a write) goes to the Python dispatch, which does the same and more. So this file holds no rule
   and decides nothing: it builds the key, looks up the plan, appends the Call and wraps the result.

   Everything runs under the interpreter lock. A call is appended without any other lock, since no Python code runs
   meanwhile. Nothing that a call leaves behind until its batch is handed over is tracked by the garbage collector, or the
   many calls under way would make it search the whole process again and again. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define MOST_ITEMS 96 /* parts of a key, and inputs of a call, that are handled here */
#define MOST_OUTPUTS 8

/* ------------------------------------------------------------------ what Python hands over in bind() */

static PyObject *g_rlock;       /* threading.RLock */
static PyObject *g_slow;        /* dispatch in Python: (cls, func, types, args, kwargs) */
static PyObject *g_calls;       /* the class Calls */
static PyObject *g_group;       /* the class Group */
static PyObject *g_make;        /* torch.Tensor._make_wrapper_subclass */
static PyObject *g_tensor;      /* torch.Tensor */
static PyObject *g_inference;   /* torch.is_inference_mode_enabled */
static PyObject *g_dtype;       /* torch.get_default_dtype */
static PyObject *g_wrap;        /* wrap(cls, spec, value, base) */
static PyObject *g_library;     /* file name -> whether it is PyTorch's or dtorch's */
static PyObject *g_is_library;  /* the same, asked for the first time */
static PyObject *g_operators;   /* id of an operator -> Operator */
static PyObject *g_current;     /* the session's Stream, or NULL */
static PyObject *g_class;       /* the tensor class whose slots are known */
static Py_ssize_t g_spec_at, g_value_at;

static PyObject *s_flush, *s_free_early, *s_is_inference;

/* ------------------------------------------------------------------ Stream, Value, and what is known beforehand */

typedef struct {
    PyObject_HEAD
    PyObject *outbox, *sites, *freed, *cache, *lock, *scalars, *default_dtype;
    Py_ssize_t room, batch_limit, large_nbytes, free_limit;
    long long next;
    long long *words; /* the run of calls that is open, packed as Calls says */
    Py_ssize_t words_n, words_room, run_n, batch_n;
} Stream;

typedef struct {
    PyObject_HEAD
    PyObject *client, *group, *settled;
    long long handle;
} Value;

typedef struct {
    PyObject_HEAD
    PyObject *handler, *key;
    char changing, quick;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *outs; /* for each output (spec, arguments of its wrapper, keyword arguments) */
    long long number;
    Py_ssize_t nbytes;
    char aliases, simple, bare;
} Ready;

static int stream_traverse(Stream *self, visitproc visit, void *arg) {
    Py_VISIT(self->outbox); Py_VISIT(self->sites); Py_VISIT(self->freed); Py_VISIT(self->cache); Py_VISIT(self->lock);
    Py_VISIT(self->scalars); Py_VISIT(self->default_dtype);
    return 0;
}

static int stream_clear(Stream *self) {
    Py_CLEAR(self->outbox); Py_CLEAR(self->sites); Py_CLEAR(self->freed); Py_CLEAR(self->cache); Py_CLEAR(self->lock);
    Py_CLEAR(self->scalars); Py_CLEAR(self->default_dtype);
    return 0;
}

static void stream_dealloc(Stream *self) {
    PyObject_GC_UnTrack(self);
    stream_clear(self);
    PyMem_Free(self->words);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Stream *self = (Stream *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->lock = PyObject_CallNoArgs(g_rlock);
    self->outbox = PyList_New(0);
    self->sites = PyList_New(0);
    self->freed = PyList_New(0);
    self->cache = PyDict_New();
    self->scalars = PyList_New(0);
    self->next = 1;
    if (!self->outbox || !self->sites || !self->freed || !self->cache || !self->lock || !self->scalars) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *stream_new_handle(Stream *self, PyObject *unused) { return PyLong_FromLongLong(self->next++); }

static PyObject *swapped(PyObject **field, PyObject *fresh) {
    PyObject *old = *field;
    *field = fresh;
    return old;
}

/* Close the open run: its calls become one instruction of the outbox. Making a list may let other code run, the rest not. */
static int end_run(Stream *self) {
    PyObject *fresh = PyList_New(0);
    if (fresh == NULL)
        return -1;
    if (self->run_n == 0) {
        Py_DECREF(fresh);
        return 0;
    }
    PyObject *words = PyBytes_FromStringAndSize((char *)self->words, self->words_n * sizeof *self->words);
    PyObject *count = PyLong_FromSsize_t(self->run_n), *scalars = swapped(&self->scalars, fresh);
    PyObject *parts[] = {words, scalars, count}, *calls = words && count ? PyObject_Vectorcall(g_calls, parts, 3, NULL) : NULL;
    int done = calls == NULL ? -1 : PyList_Append(self->outbox, calls);
    Py_XDECREF(words); Py_XDECREF(count); Py_DECREF(scalars); Py_XDECREF(calls);
    self->words_n = self->run_n = 0;
    return done;
}

static PyObject *stream_end_run(Stream *self, PyObject *unused) {
    if (end_run(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_take(Stream *self, PyObject *unused) {
    PyObject *outbox = PyList_New(0), *sites = PyList_New(0), *taken = PyTuple_New(2);
    if (!outbox || !sites || !taken || end_run(self) < 0) {
        Py_XDECREF(outbox); Py_XDECREF(sites); Py_XDECREF(taken);
        return NULL;
    }
    self->batch_n = 0;
    PyTuple_SET_ITEM(taken, 0, swapped(&self->outbox, outbox));
    PyTuple_SET_ITEM(taken, 1, swapped(&self->sites, sites));
    return taken;
}

static PyObject *stream_take_freed(Stream *self, PyObject *unused) {
    PyObject *fresh = PyList_New(0);
    return fresh ? swapped(&self->freed, fresh) : NULL;
}

/* Room for more words of the open run. */
static long long *words_for(Stream *self, Py_ssize_t more) {
    if (self->words_n + more > self->words_room) {
        Py_ssize_t room = 2 * (self->words_n + more) + 1024;
        long long *words = PyMem_Realloc(self->words, room * sizeof *words);
        if (words == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        self->words = words;
        self->words_room = room;
    }
    return self->words + self->words_n;
}

static int told(PyObject *done) {
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

typedef struct {
    long long plan;
    const long long *inputs, *outputs;
    PyObject *const *scalars;
    Py_ssize_t inputs_n, outputs_n, scalars_n;
} Packed;

/* Append a call and the code and instruction of its site; hand the batch over when it is full. */
static int stream_append(Stream *self, const Packed *call, PyObject *code, PyObject *lasti, Py_ssize_t nbytes) {
    Py_ssize_t freed = PyList_GET_SIZE(self->freed);
    if (freed && (nbytes >= self->large_nbytes || freed >= self->free_limit)) {
        PyObject *size = PyLong_FromSsize_t(nbytes);
        int done = size ? told(PyObject_CallMethodOneArg((PyObject *)self, s_free_early, size)) : -1;
        Py_XDECREF(size);
        if (done < 0)
            return -1;
    }
    Py_ssize_t more = 4 + call->inputs_n + call->outputs_n;
    long long *words = words_for(self, more);
    if (words == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < call->scalars_n; i++)
        if (PyList_Append(self->scalars, call->scalars[i]) < 0)
            return -1;
    if (PyList_Append(self->sites, code) < 0 || PyList_Append(self->sites, lasti) < 0)
        return -1;
    words[0] = call->plan, words[1] = call->inputs_n, words[2] = call->outputs_n, words[3] = call->scalars_n;
    memcpy(words + 4, call->inputs, call->inputs_n * sizeof *words);
    memcpy(words + 4 + call->inputs_n, call->outputs, call->outputs_n * sizeof *words);
    self->words_n += more;
    self->run_n++;
    self->room -= nbytes;
    return self->room < 0 || ++self->batch_n >= self->batch_limit ? told(PyObject_CallMethodNoArgs((PyObject *)self, s_flush)) : 0;
}

/* The integers of a list. */
static int read_handles(PyObject *list, long long *out) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if ((out[i] = PyLong_AsLongLong(PyList_GET_ITEM(list, i))) == -1 && PyErr_Occurred())
            return -1;
    return 0;
}

/* call(plan, inputs, outputs, scalars, code, lasti, nbytes) */
static PyObject *stream_call(Stream *self, PyObject *const *a, Py_ssize_t n) {
    if (n != 7 || !PyList_Check(a[1]) || !PyList_Check(a[2]) || !PyList_Check(a[3])) {
        PyErr_SetString(PyExc_TypeError, "call(plan, inputs: list, outputs: list, scalars: list, code, lasti, nbytes)");
        return NULL;
    }
    Packed call = {.inputs_n = PyList_GET_SIZE(a[1]), .outputs_n = PyList_GET_SIZE(a[2]), .scalars_n = PyList_GET_SIZE(a[3])};
    call.plan = PyLong_AsLongLong(a[0]);
    call.scalars = PySequence_Fast_ITEMS(a[3]);
    Py_ssize_t nbytes = PyLong_AsSsize_t(a[6]);
    if (PyErr_Occurred())
        return NULL;
    long long *handles = PyMem_Malloc((call.inputs_n + call.outputs_n) * sizeof *handles);
    if (handles == NULL)
        return PyErr_NoMemory();
    call.inputs = handles, call.outputs = handles + call.inputs_n;
    int failed = read_handles(a[1], handles) < 0 || read_handles(a[2], handles + call.inputs_n) < 0 ||
                 stream_append(self, &call, a[4], a[5], nbytes) < 0;
    PyMem_Free(handles);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef stream_methods[] = {
    {"new_handle", (PyCFunction)stream_new_handle, METH_NOARGS, "Allot the name of a value."},
    {"take", (PyCFunction)stream_take, METH_NOARGS, "The batch and its sites, replaced by empty ones at one stroke."},
    {"take_freed", (PyCFunction)stream_take_freed, METH_NOARGS, "What has been freed, replaced by an empty list."},
    {"end_run", (PyCFunction)stream_end_run, METH_NOARGS, "Make the calls so far one instruction of the outbox."},
    {"pack", (PyCFunction)(void (*)(void))stream_call, METH_FASTCALL, "Append a call to the open run."},
    {NULL},
};

static PyMemberDef stream_members[] = {
    {"outbox", T_OBJECT_EX, offsetof(Stream, outbox), 0, NULL}, {"sites", T_OBJECT_EX, offsetof(Stream, sites), 0, NULL},
    {"freed", T_OBJECT_EX, offsetof(Stream, freed), 0, NULL},   {"cache", T_OBJECT_EX, offsetof(Stream, cache), 0, NULL},
    {"lock", T_OBJECT_EX, offsetof(Stream, lock), 0, NULL},     {"room", T_PYSSIZET, offsetof(Stream, room), 0, NULL},
    {"batch_limit", T_PYSSIZET, offsetof(Stream, batch_limit), 0, NULL}, {"large_nbytes", T_PYSSIZET, offsetof(Stream, large_nbytes), 0, NULL},
    {"default_dtype", T_OBJECT, offsetof(Stream, default_dtype), 0, NULL},
    {"free_limit", T_PYSSIZET, offsetof(Stream, free_limit), 0, NULL},
    {NULL},
};

static PyTypeObject StreamType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dtorch.tensor._fastpath.Stream",
    .tp_basicsize = sizeof(Stream),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = stream_new,
    .tp_traverse = (traverseproc)stream_traverse,
    .tp_clear = (inquiry)stream_clear,
    .tp_dealloc = (destructor)stream_dealloc,
    .tp_methods = stream_methods,
    .tp_members = stream_members,
};

static int value_traverse(Value *self, visitproc visit, void *arg) {
    Py_VISIT(self->client); Py_VISIT(self->group); Py_VISIT(self->settled);
    return 0;
}

static int value_clear(Value *self) {
    Py_CLEAR(self->group); Py_CLEAR(self->settled);
    return 0;
}

/* The death of a value frees its handle, in stream order: with the next batch. */
static void value_dealloc(Value *self) {
    PyObject_GC_UnTrack(self);
    PyObject *freed = self->client ? ((Stream *)self->client)->freed : NULL;
    if (freed != NULL) {
        PyObject *type, *value, *trace, *handle;
        PyErr_Fetch(&type, &value, &trace);
        handle = PyLong_FromLongLong(self->handle);
        if (handle == NULL || PyList_Append(freed, handle) < 0)
            PyErr_WriteUnraisable((PyObject *)self);
        Py_XDECREF(handle);
        PyErr_Restore(type, value, trace);
    }
    value_clear(self);
    Py_CLEAR(self->client);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ValueType;

/* A value over a handle; takes no reference over. */
static Value *value_over(PyObject *client, long long handle) {
    Value *self = (Value *)ValueType.tp_alloc(&ValueType, 0);
    if (self == NULL)
        return NULL;
    self->client = Py_NewRef(client);
    self->group = Py_NewRef(Py_None);
    self->settled = Py_NewRef(Py_None);
    self->handle = handle;
    return self;
}

static PyObject *value_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"client", "handle", NULL};
    PyObject *client;
    long long handle;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!L", names, &StreamType, &client, &handle))
        return NULL;
    return (PyObject *)value_over(client, handle);
}

/* The value's group, made at first need; a borrowed reference. */
static PyObject *group_of(Value *self) {
    if (self->group == Py_None) {
        PyObject *group = PyObject_CallFunction(g_group, "L", self->handle);
        if (group == NULL)
            return NULL;
        Py_SETREF(self->group, group);
    }
    return self->group;
}

static PyObject *value_shared_group(Value *self, PyObject *unused) { return Py_XNewRef(group_of(self)); }

static PyMethodDef value_methods[] = {
    {"shared_group", (PyCFunction)value_shared_group, METH_NOARGS, "The value's group, made at first need."},
    {NULL},
};

static PyMemberDef value_members[] = {
    {"client", T_OBJECT, offsetof(Value, client), READONLY, NULL}, {"group", T_OBJECT, offsetof(Value, group), 0, NULL},
    {"settled", T_OBJECT, offsetof(Value, settled), 0, NULL},      {"handle", T_LONGLONG, offsetof(Value, handle), READONLY, NULL},
    {NULL},
};

static PyTypeObject ValueType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dtorch.tensor._fastpath.Value",
    .tp_basicsize = sizeof(Value),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Owner of one handle: when it dies, the workers forget the value, in stream order.",
    .tp_new = value_new,
    .tp_traverse = (traverseproc)value_traverse,
    .tp_clear = (inquiry)value_clear,
    .tp_dealloc = (destructor)value_dealloc,
    .tp_methods = value_methods,
    .tp_members = value_members,
};

static void known_dealloc(Known *self) {
    Py_CLEAR(self->handler); Py_CLEAR(self->key);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef known_members[] = {
    {"handler", T_OBJECT, offsetof(Known, handler), 0, NULL},
    {"key", T_OBJECT, offsetof(Known, key), 0, NULL},
    {"changing", T_BOOL, offsetof(Known, changing), 0, NULL},
    {"quick", T_BOOL, offsetof(Known, quick), 0, NULL},
    {NULL},
};

static PyTypeObject KnownType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dtorch.tensor._fastpath.Known",
    .tp_basicsize = sizeof(Known),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)known_dealloc,
    .tp_members = known_members,
};

static void ready_dealloc(Ready *self) {
    Py_CLEAR(self->outs);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef ready_members[] = {
    {"number", T_LONGLONG, offsetof(Ready, number), 0, NULL}, {"outs", T_OBJECT, offsetof(Ready, outs), 0, NULL},
    {"nbytes", T_PYSSIZET, offsetof(Ready, nbytes), 0, NULL}, {"aliases", T_BOOL, offsetof(Ready, aliases), 0, NULL},
    {"simple", T_BOOL, offsetof(Ready, simple), 0, NULL},     {"bare", T_BOOL, offsetof(Ready, bare), 0, NULL},
    {NULL},
};

static PyTypeObject ReadyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dtorch.tensor._fastpath.Ready",
    .tp_basicsize = sizeof(Ready),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)ready_dealloc,
    .tp_members = ready_members,
};

/* ------------------------------------------------------------------ the key of a call */

typedef struct {
    PyObject *items[MOST_ITEMS]; /* owned */
    long long handles[MOST_ITEMS];
    PyObject *scalars[MOST_ITEMS]; /* borrowed from the arguments */
    Py_ssize_t items_n, handles_n, scalars_n;
} Key;

enum { FITS, DECLINED, FAILED };

static int key_add(Key *key, PyObject *item) { /* takes the reference over */
    if (item == NULL)
        return FAILED;
    if (key->items_n == MOST_ITEMS) {
        Py_DECREF(item);
        return DECLINED;
    }
    key->items[key->items_n++] = item;
    return FITS;
}

/* A static argument and its type. Zeros of either sign are equal, and no NaN is: their text is what tells them. */
static int key_add_static(Key *key, PyObject *a) {
    PyObject *type = (PyObject *)Py_TYPE(a), *item;
    if (PyFloat_CheckExact(a)) {
        double number = PyFloat_AS_DOUBLE(a);
        item = number == 0 || number != number ? PyObject_Repr(a) : Py_NewRef(a);
    } else
        item = PyComplex_CheckExact(a) ? PyObject_Repr(a) : Py_NewRef(a);
    int added = key_add(key, item);
    return added == FITS ? key_add(key, Py_NewRef(type)) : added;
}

static PyObject *slot_of(PyObject *tensor, Py_ssize_t at) { return *(PyObject **)((char *)tensor + at); }

static int key_add_tensor(Key *key, PyObject *tensor) {
    PyObject *spec = slot_of(tensor, g_spec_at);
    Value *value = (Value *)slot_of(tensor, g_value_at);
    if (spec == NULL || value == NULL || value->client != g_current)
        return DECLINED;
    if (value->group != Py_None) {
        PyObject *link = PyObject_GetAttrString(value->group, "link");
        if (link == NULL)
            return FAILED;
        Py_DECREF(link);
        if (link != Py_None)
            return DECLINED;
    }
    if (key->handles_n == MOST_ITEMS)
        return DECLINED;
    key->handles[key->handles_n++] = value->handle;
    return key_add(key, Py_NewRef(spec));
}

/* Whether a number comes with each call: as `changes` in dispatch.py. */
static int changes(PyObject *a) {
    if (PyFloat_CheckExact(a))
        return PyFloat_AS_DOUBLE(a) != 0 && isfinite(PyFloat_AS_DOUBLE(a));
    if (PyLong_CheckExact(a) || PyBool_Check(a))
        return PyObject_IsTrue(a);
    if (!PyComplex_CheckExact(a))
        return 0;
    Py_complex c = PyComplex_AsCComplex(a);
    return (c.real != 0 || c.imag != 0) && isfinite(c.real) && isfinite(c.imag);
}

static int key_add_argument(Key *key, PyObject *a, PyObject *cls, int changing) {
    if ((PyObject *)Py_TYPE(a) == cls)
        return key_add_tensor(key, a);
    if (changing && changes(a)) {
        key->scalars[key->scalars_n++] = a;
        return key_add(key, Py_NewRef((PyObject *)Py_TYPE(a)));
    }
    if (PyList_Check(a) || PyTuple_Check(a)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(a);
        int added = key_add(key, PyLong_FromSsize_t(n));
        for (Py_ssize_t i = 0; added == FITS && i < n; i++)
            added = key_add_argument(key, PySequence_Fast_GET_ITEM(a, i), cls, 0);
        return added;
    }
    if (a != Py_None && PyObject_TypeCheck(a, (PyTypeObject *)g_tensor))
        return DECLINED;
    return key_add_static(key, a);
}

static int key_build(Key *key, Known *operator, PyObject *cls, PyObject *args, PyObject *kwargs) {
    int added = key_add(key, Py_NewRef(operator->key));
    if (added == FITS)
        added = key_add(key, Py_NewRef(cls)); /* wrappers are of it */
    for (Py_ssize_t i = 0; added == FITS && i < PyTuple_GET_SIZE(args); i++)
        added = key_add_argument(key, PyTuple_GET_ITEM(args, i), cls, operator->changing);
    PyObject *name, *a;
    Py_ssize_t at = 0;
    while (kwargs != NULL && added == FITS && PyDict_Next(kwargs, &at, &name, &a))
        added = key_add_static(key, name);
    at = 0;
    while (kwargs != NULL && added == FITS && PyDict_Next(kwargs, &at, &name, &a))
        added = key_add_argument(key, a, cls, operator->changing);
    return added;
}

/* The plan of this call if it is known, borrowed; NULL with or without an error. Lets go of the key. */
static Ready *plan_of(Key *key, PyObject *cache) {
    PyObject *tuple = PyTuple_New(key->items_n);
    for (Py_ssize_t i = 0; i < key->items_n; i++)
        if (tuple != NULL)
            PyTuple_SET_ITEM(tuple, i, key->items[i]);
        else
            Py_DECREF(key->items[i]);
    if (tuple == NULL)
        return NULL;
    Ready *entry = (Ready *)PyDict_GetItemWithError(cache, tuple);
    Py_DECREF(tuple);
    return entry != NULL && PyObject_TypeCheck(entry, &ReadyType) ? entry : NULL;
}

/* ------------------------------------------------------------------ the user's line */

static int is_library(PyObject *filename) {
    PyObject *known = PyDict_GetItemWithError(g_library, filename);
    if (known != NULL)
        return known == Py_True;
    if (PyErr_Occurred())
        return -1;
    PyObject *answer = PyObject_CallOneArg(g_is_library, filename);
    if (answer == NULL)
        return -1;
    Py_DECREF(answer);
    return answer == Py_True;
}

/* Code object and last instruction of the innermost frame that is the user's; None and 0 where there is none. */
static int current_site(PyObject **code_out, PyObject **lasti_out) {
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    int library = 1;
    while (frame != NULL && library > 0) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyFrameObject *back = NULL;
        library = is_library(code->co_filename);
        if (library == 0) {
            *code_out = Py_NewRef(code);
            *lasti_out = PyLong_FromLong(PyFrame_GetLasti(frame));
        } else if (library > 0)
            back = PyFrame_GetBack(frame);
        Py_DECREF(code);
        Py_DECREF(frame);
        frame = back;
    }
    if (library > 0) {
        *code_out = Py_NewRef(Py_None);
        *lasti_out = PyLong_FromLong(0);
    }
    return library < 0 || *lasti_out == NULL ? -1 : 0;
}

/* ------------------------------------------------------------------ issue and wrap */

/* Append the Call of a plan with its outputs' handles. */
static int issue(Stream *stream, Ready *entry, Key *key, const long long *handles) {
    PyObject *code = NULL, *lasti = NULL;
    int done = current_site(&code, &lasti);
    Packed call = {entry->number, key->handles, handles, key->scalars, key->handles_n, PyTuple_GET_SIZE(entry->outs), key->scalars_n};
    if (done == 0)
        done = stream_append(stream, &call, code, lasti, entry->nbytes);
    Py_XDECREF(code);
    Py_XDECREF(lasti);
    return done;
}

/* Whether a view of this tensor must be made outside inference mode: autograd counts the writes to its base. */
static int needs_care(PyObject *base) {
    PyObject *answer = PyObject_CallNoArgs(g_inference);
    if (answer == NULL)
        return -1;
    Py_DECREF(answer);
    if (answer != Py_True)
        return 0;
    answer = PyObject_CallMethodNoArgs(base, s_is_inference);
    if (answer == NULL)
        return -1;
    Py_DECREF(answer);
    return answer != Py_True;
}

/* The wrapper of an output; takes the value over. */
static PyObject *wrapped(PyObject *out, Value *value) {
    PyObject *made = PyObject_Call(g_make, PyTuple_GET_ITEM(out, 1), PyTuple_GET_ITEM(out, 2));
    if (made == NULL) {
        Py_DECREF(value);
        return NULL;
    }
    *(PyObject **)((char *)made + g_spec_at) = Py_NewRef(PyTuple_GET_ITEM(out, 0));
    *(PyObject **)((char *)made + g_value_at) = (PyObject *)value;
    return made;
}

static PyObject *view_of(PyObject *cls, PyObject *out, Value *value, PyObject *base) {
    PyObject *group = group_of((Value *)slot_of(base, g_value_at));
    int care = group ? needs_care(base) : -1;
    if (care >= 0)
        Py_SETREF(value->group, Py_NewRef(group));
    if (care == 0)
        return wrapped(out, value);
    PyObject *made = care < 0 ? NULL : PyObject_CallFunctionObjArgs(g_wrap, cls, PyTuple_GET_ITEM(out, 0), value, base, NULL);
    Py_DECREF(value);
    return made;
}

/* Wrap one value of a plan; takes it over. */
static PyObject *wrapped_one(Ready *entry, Value **values, Py_ssize_t i, PyObject *cls, PyObject *args) {
    PyObject *out = PyTuple_GET_ITEM(entry->outs, i);
    Value *value = values[i];
    values[i] = NULL;
    return entry->aliases ? view_of(cls, out, value, PyTuple_GET_ITEM(args, 0)) : wrapped(out, value);
}

/* Wrap values as the result of a plan; those that it takes over become NULL. */
static PyObject *wrapped_all(Ready *entry, Value **values, Py_ssize_t n, PyObject *cls, PyObject *args) {
    if (entry->bare)
        return wrapped_one(entry, values, 0, cls, args);
    PyObject *results = PyTuple_New(n);
    for (Py_ssize_t i = 0; results != NULL && i < n; i++) {
        PyObject *result = wrapped_one(entry, values, i, cls, args);
        if (result == NULL)
            Py_CLEAR(results);
        else
            PyTuple_SET_ITEM(results, i, result);
    }
    return results;
}

/* Call a plan and wrap what it makes. The values come first, for handing over may raise, and what was made must be freed then. */
static PyObject *called(Stream *stream, Ready *entry, Key *key, PyObject *cls, PyObject *args) {
    long long handles[MOST_OUTPUTS];
    Value *values[MOST_OUTPUTS] = {NULL};
    Py_ssize_t n = PyTuple_GET_SIZE(entry->outs);
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        handles[i] = stream->next++;
        failed = (values[i] = value_over((PyObject *)stream, handles[i])) == NULL;
    }
    failed = failed || issue(stream, entry, key, handles) < 0;
    PyObject *result = failed ? NULL : wrapped_all(entry, values, n, cls, args);
    for (Py_ssize_t i = 0; i < n; i++)
        Py_XDECREF(values[i]);
    return result;
}

static Known *operator_of(PyObject *func) {
    PyObject *id = PyLong_FromVoidPtr(func);
    if (id == NULL)
        return NULL;
    PyObject *known = PyDict_GetItemWithError(g_operators, id);
    Py_DECREF(id);
    return (Known *)known;
}

/* Whether the default dtype is that of the stream. */
static int same_dtype(Stream *stream) {
    PyObject *dtype = PyObject_CallNoArgs(g_dtype);
    Py_XDECREF(dtype);
    return dtype == NULL ? -1 : dtype == stream->default_dtype;
}

/* dispatch(cls, func, types, args=(), kwargs=None) */
static PyObject *dispatch(PyObject *module, PyObject *const *a, Py_ssize_t n, PyObject *names) {
    PyObject *cls = n > 0 ? a[0] : NULL, *args = n > 3 ? a[3] : NULL, *kwargs = n > 4 && a[4] != Py_None ? a[4] : NULL;
    if (g_current == NULL || names != NULL || cls != g_class || args == NULL || !PyTuple_CheckExact(args))
        goto slow;
    int usual = same_dtype((Stream *)g_current);
    if (usual < 0)
        return NULL;
    Known *operator = usual ? operator_of(a[1]) : NULL;
    if (operator == NULL || (operator->handler != Py_None && !operator->quick)) {
        if (PyErr_Occurred())
            return NULL;
        goto slow;
    }
    Key key = {.items_n = 0, .handles_n = 0, .scalars_n = 0};
    int built = key_build(&key, operator, cls, args, kwargs);
    if (built != FITS) {
        while (key.items_n)
            Py_DECREF(key.items[--key.items_n]);
        if (built == FAILED)
            return NULL;
        goto slow;
    }
    Stream *stream = (Stream *)g_current;
    Ready *entry = plan_of(&key, stream->cache);
    if (entry == NULL && PyErr_Occurred())
        return NULL;
    if (entry == NULL || !entry->simple || PyTuple_GET_SIZE(entry->outs) > MOST_OUTPUTS)
        goto slow;
    Py_INCREF(entry); /* the cache may forget it while the batch is handed over, and the session may end */
    Py_INCREF(stream);
    PyObject *result = called(stream, entry, &key, cls, args);
    Py_DECREF(stream);
    Py_DECREF(entry);
    return result;
slow:
    return PyObject_Vectorcall(g_slow, a, n, names);
}

static PyObject *set_current(PyObject *module, PyObject *stream) {
    Py_XSETREF(g_current, stream == Py_None ? NULL : Py_NewRef(stream));
    Py_RETURN_NONE;
}

static int offset_of(PyObject *cls, const char *name, Py_ssize_t *at) {
    PyObject *slot = PyObject_GetAttrString(cls, name);
    if (slot == NULL)
        return -1;
    int fits = Py_IS_TYPE(slot, &PyMemberDescr_Type);
    if (fits)
        *at = ((PyMemberDescrObject *)slot)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%R has no slot %s", cls, name);
    Py_DECREF(slot);
    return fits ? 0 : -1;
}

/* bind(cls, **what): the tensor class, and what Python knows how to do. */
static PyObject *bind(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"cls", "slow", "calls", "group", "make", "tensor", "inference", "dtype", "wrap", "library", "is_library", "operators", NULL};
    PyObject *cls, *slow, *calls, *group, *make, *tensor, *inference, *dtype, *wrap, *library, *is_library_fn, *operators;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO!OOOO!OO!", names, &PyType_Type, &cls, &slow, &calls, &group, &make,
                                     &PyType_Type, &tensor, &inference, &dtype, &wrap, &PyDict_Type, &library, &is_library_fn,
                                     &PyDict_Type, &operators))
        return NULL;
    if (offset_of(cls, "_spec", &g_spec_at) < 0 || offset_of(cls, "_value", &g_value_at) < 0)
        return NULL;
    PyObject **places[] = {&g_class, &g_slow, &g_calls, &g_group, &g_make, &g_tensor, &g_inference, &g_dtype, &g_wrap, &g_library, &g_is_library, &g_operators};
    PyObject *given[] = {cls, slow, calls, group, make, tensor, inference, dtype, wrap, library, is_library_fn, operators};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        Py_XSETREF(*places[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", (PyCFunction)(void (*)(void))bind, METH_VARARGS | METH_KEYWORDS, "Hand over what this module needs of Python."},
    {"dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL | METH_KEYWORDS, "Issue one operator call and wrap its results."},
    {"set_current", set_current, METH_O, "Make a stream the one that calls go to; None for none."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastpath", "The hot path of dispatch.", -1, functions};

PyMODINIT_FUNC PyInit__fastpath(void) {
    PyObject *module = PyModule_Create(&definition);
    s_flush = PyUnicode_InternFromString("flush");
    s_free_early = PyUnicode_InternFromString("free_early");
    s_is_inference = PyUnicode_InternFromString("is_inference");
    PyObject *threading = PyImport_ImportModule("threading");
    g_rlock = threading ? PyObject_GetAttrString(threading, "RLock") : NULL;
    Py_XDECREF(threading);
    if (module == NULL || !g_rlock || !s_flush || !s_free_early || !s_is_inference || PyModule_AddType(module, &StreamType) < 0 ||
        PyModule_AddType(module, &ValueType) < 0 || PyModule_AddType(module, &KnownType) < 0 ||
        PyModule_AddType(module, &ReadyType) < 0)
        return NULL;
    return module;
}
